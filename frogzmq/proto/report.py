"""What a peer can say about its groups: snapshots for ``peek`` and words for error messages."""

from __future__ import annotations

from typing import Any

from frogzmq.content.audit import Testimony
from frogzmq.content.receipt import Receipt
from frogzmq.plan.plan import Plan
from frogzmq.proto.group import Group
from frogzmq.proto.joining import Joining
from frogzmq.proto.op import Op
from frogzmq.proto.peers import PeerTable
from frogzmq.proto.receipts import Record
from frogzmq.wire.mail import MAIL_SEQ, split_seq

MAX_OPS_SHOWN = 64


def explain(group: Group, seq: int, peers: PeerTable) -> str:
    """Why op ``seq`` is not done: which ranks have not arrived, and whether they are alive."""
    if group.limit is not None and seq >= group.limit[0] and (seq < MAIL_SEQ or group.broken):
        return group.limit[2]
    if seq >= MAIL_SEQ:
        return group.mail.explain(*split_seq(seq))
    op = group.ops.get(seq)
    if op is None:
        return (
            f"op {seq} has completed on this machine" if seq < group.done else f"op {seq} was not called yet"
        )
    if op.complete and op.watched:
        return _unverified(group, op)
    words = [
        _local(group, op, rank) for rank, alive in group.local.items() if not op.handed_over(rank) and alive
    ]
    for host in sorted(op.lacking()) if op.plan is not None else []:
        state = "alive" if peers.is_up(group.hosts[host].peer) else "not reachable"
        words.append(f"{group.machine(host)} {state}, its contribution has not arrived in full")
    return "; ".join(words) or f"op {seq} has every contribution and is being folded"


def _unverified(group: Group, op: Op) -> str:
    late = group.ledger.awaited(op.seq) if group.ledger is not None else []
    names = ", ".join(group.machine(host) for host in late)
    return f"op {op.seq} has completed on this machine and waits for the receipts of {names or 'its ranks'}"


def _local(group: Group, op: Op, rank: int) -> str:
    if rank not in op.posted:
        return f"rank {rank} alive, not arrived"
    return f"rank {rank} alive, has handed over {op.ready[rank]} bytes so far"


def group_snapshot(group: Group, joining: Joining | None, now: float) -> dict[str, Any]:
    """A group for ``peek``: plain values only."""
    state = "broken" if group.broken else "forming" if joining and not joining.settled else "running"
    return {
        "gid": group.hex,
        "job": group.job,
        "name": group.name,
        "size": group.size,
        "mode": str(group.options.mode),
        "order": str(group.options.order),
        "state": state,
        "error": group.limit[2] if group.limit is not None else "",
        "hosts": [
            {"peer": host.peer, "name": group.members[host.ranks[0]].who.name, "ranks": list(host.ranks)}
            for host in group.hosts
        ],
        "ranks": [
            {"rank": rank, "pid": group.members[rank].pid, "alive": alive}
            for rank, alive in sorted(group.local.items())
        ],
        "ops_done": group.ops_done,
        "ops": [_op_snapshot(group, group.ops[seq], now) for seq in sorted(group.ops)[:MAX_OPS_SHOWN]],
        "ops_in_flight": len(group.ops),
        "mail": group.mail.snapshot(now),
        "recent": [
            {"seq": seq, "what": op.plan.descriptor.describe(), "observed": observed(group, op)}
            for seq, op in group.recent
            if op.plan is not None
        ],
    }


def receipts_of(group: Group) -> list[dict[str, Any]]:
    """The receipts of a group, oldest first: plain values only."""
    ledger = group.ledger
    if ledger is None:
        return []
    return [
        _receipt(group, record, record.plan)
        for _, record in sorted(ledger.records.items())
        if record.plan is not None
    ]


def _receipt(group: Group, record: Record, plan: Plan) -> dict[str, Any]:
    descriptor = plan.descriptor
    digest, result = descriptor.digest(record.seq), record.result
    roots = [record.parts.get(part.index) for part in plan.parts]
    known = [root for root in roots if root is not None]
    whole = Receipt(record.seq, digest, tuple(known), result) if result and len(known) == len(roots) else None
    names = [group.members[host.ranks[0]].who.name for host in group.hosts]
    return {
        "group": group.name,
        "gid": group.hex,
        "seq": record.seq,
        "kind": descriptor.kind.name.lower(),
        "what": descriptor.describe(),
        "state": record.state,
        "difference": record.text,
        "descriptor": digest.hex(),
        "parts": [
            {"machine": names[part.host], "ranks": list(part.ranks), "root": root.hex() if root else None}
            for part, root in zip(plan.parts, roots, strict=True)
        ],
        "result": result.hex() if result else None,
        "receipt": whole.digest.hex() if whole else None,
        "got": {str(rank): root.hex() for rank, root in sorted(record.got.items())},
        "root": descriptor.root,
        "host": group.here,
        "machines": [
            {"name": name, "ranks": list(host.ranks)} for name, host in zip(names, group.hosts, strict=True)
        ],
        "said": _said(record.heard.get(group.here)),
    }


def _said(mine: Testimony | None) -> dict[str, Any] | None:
    """Our testimony as it is compared with others'."""
    if mine is None:
        return None
    return {
        "op": mine.descriptor.hex(),
        "given": [[part, root.hex()] for part, root in mine.given],
        "held": (mine.held or b"").hex(),
        "result": (mine.result or b"").hex(),
        "odd": [[rank, root.hex()] for rank, root in mine.odd],
    }


def _op_snapshot(group: Group, op: Op, now: float) -> dict[str, Any]:
    plan, view = op.plan, op.view
    missing: list[int] = []
    if plan is not None and view is not None:
        seen = {rank for ranks, _, _ in op.observed for rank in ranks}
        due = [part for part in plan.parts if part.host == group.here or part.index in view.part_left]
        missing = [rank for part in due for rank in part.ranks if rank not in seen]
    return {
        "seq": op.seq,
        "what": plan.descriptor.describe() if plan is not None else "not called here yet",
        "mode": str(plan.mode) if plan is not None else "",
        "age_s": now - op.opened_at,
        "pieces": view.pieces_left if view is not None else 0,
        "pieces_done": sum(op.piece_done),
        "complete": op.complete,
        "observed": observed(group, op),
        "missing": missing,
    }


def observed(group: Group, op: Op) -> list[dict[str, Any]]:
    """Contributions in the order in which this machine observed them."""
    return [
        {"ranks": list(ranks), "peer": group.hosts[host].peer, "local": host == group.here, "at_s": at}
        for ranks, host, at in op.observed
    ]
