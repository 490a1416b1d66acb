"""One process group on one machine: who is in it, its ops in flight, and how it ends.

A group is *settled* when every machine has said that all its ranks have joined with the same member table
and options (``GroupReady``, repeated until everyone has heard everyone); only then may ops run, so no
chunk ever meets a machine that has not heard of its group. After that, ops are numbered by each rank alike.

``done`` is this machine's watermark: every op below it is complete here. It rides on every chunk, and in
``OpDone`` when nothing else is sent; an op is closed (its bytes dropped) when all machines are past it.
"""

from __future__ import annotations

from collections import deque

from frogzmq.content.manifest import root_of
from frogzmq.descriptor import Descriptor, decode_descriptor
from frogzmq.machine import CloseGroup, CloseOp, Effect, Fail, Joined, Publish, Send
from frogzmq.plan.plan import Plan, make_hosts
from frogzmq.plan.strategy import make_plan
from frogzmq.proto.op import Op
from frogzmq.proto.settings import CoreSettings
from frogzmq.proto.view import View
from frogzmq.types import GroupId, PeerId
from frogzmq.wire.messages import (
    ChunkHeader,
    GroupFailed,
    Have,
    JoinGroup,
    Manifest,
    OpDescriptor,
    OpDone,
    RankGone,
    Want,
)

EAGER_DONE_BYTES = 1 << 20
"""Completion of ops at least this large is told at once, so that their memory is free early."""
DONE_DELAY_S = 0.02
"""Completion of smaller ops usually rides on the next chunk; after this long it is told anyway."""
FAR_AHEAD = 4
"""A chunk may be this many windows ahead of this machine's watermark; further is a protocol error."""
PAST_ALL = 1 << 62
"""Watermark of a machine that needs nothing of the group any more, or is gone."""
LEAD = 2
"""Windows of ops that may be open at once; ranks that need nothing back are held from opening more."""
MAX_VIEWS = 256
RECENT_OPS = 8
"""Closed ops whose order of observation is kept for ``peek``."""
PATIENCE_REJECTS = 3
"""Damaged copies of one chunk before the op fails and names who sent them."""


class Group:
    """State of one settled or failing group on host ``here``. See ``proto.joining`` for how it forms."""

    def __init__(self, join: JoinGroup, me: PeerId, settings: CoreSettings) -> None:
        self.gid = GroupId(bytes.fromhex(join.gid))
        self.hex, self.job, self.name, self.size = join.gid, join.job, join.name, join.size
        self.options = join.options
        self.me, self.settings = me, settings
        self.members = {member.rank: member for member in join.members}
        self.hosts = make_hosts({rank: PeerId(m.who.peer) for rank, m in self.members.items()})
        self.here = next(i for i, host in enumerate(self.hosts) if host.peer == me)
        self.host_of = {host.peer: i for i, host in enumerate(self.hosts)}
        self.local: dict[int, bool] = {}
        """Local ranks that joined; False once they are gone."""
        self.ops: dict[int, Op] = {}
        self.done = 1
        self.complete: set[int] = set()
        self.done_there = [1] * len(self.hosts)
        self.told = [1] * len(self.hosts)
        self.tell_at = float("inf")
        self.limit: tuple[int, str, str] | None = None
        """(first op that fails, error code, text); None while all is well."""
        self.broken = False
        self.disputed = 1 << 62
        """First op that another machine calls something else; it is about to fail."""
        self.gone: dict[int, int] = {}
        """Ranks that take no further part, with the last op that has their contribution."""
        self.next_post: dict[int, int] = {}
        self.views: dict[Descriptor, View] = {}
        self.next_repair = float("inf")
        self.held_back: deque[tuple[Op, int]] = deque()
        """Ranks that only give, and have run ahead of who receives: told later that they are done."""
        self.recent: deque[tuple[int, Op]] = deque(maxlen=RECENT_OPS)
        self.repairs_asked = self.duplicates = self.ops_done = 0

    # ----------------------------------------------------------------- descriptions
    def machine(self, host: int) -> str:
        """A machine and its ranks, for people."""
        ranks = self.hosts[host].ranks
        name = self.members[ranks[0]].who.name
        return f"machine {name} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"

    def rank_text(self, rank: int) -> str:
        """A rank, its process and its machine, for people."""
        member = self.members[rank]
        return f"rank {rank} (process {member.pid} on {member.host})"

    # --------------------------------------------------------------------- posting
    def view(self, descriptor: Descriptor) -> View:
        """The plan of an op as seen from here, remembered: training repeats a handful of descriptors."""
        view = self.views.get(descriptor)
        if view is None:
            if len(self.views) >= MAX_VIEWS:
                self.views.clear()
            plan = make_plan(
                descriptor, self.hosts, self.options.mode, self.options.order,
                chunk_bytes=self.settings.chunk_bytes, small_bytes=self.settings.small_bytes,
            )  # fmt: skip
            view = self.views[descriptor] = View(plan, self.here)
        return view

    def posted(
        self, rank: int, seq: int, descriptor: Descriptor, ready: int, now: float, out: list[Effect]
    ) -> None:
        """A local rank called op ``seq``."""
        self.next_post[rank] = seq + 1
        if self.limit is not None and seq >= self.limit[0]:
            out.append(Fail(self.gid, rank, self.limit[0], self.limit[1], self.limit[2]))
            known = self.ops.get(seq)
            if known is None or known.plan is None:
                self.ops.pop(seq, None)
                out.append(CloseOp(self.gid, seq))
            return
        op = self._op(seq, now)
        if op.descriptor is None:
            if seq > self.disputed:
                op.early.clear()
            op.open(descriptor, self.view(descriptor), now, out)
        elif op.descriptor != descriptor:
            first = next(iter(op.posted))
            self.mismatch(seq, first, op.descriptor, rank, descriptor, now, out)
            return
        op.hold = len(self.ops) > LEAD * self.settings.window
        op.post(rank, ready, now, out)
        early_tags, op.early_tags = op.early_tags, {}
        for host, tag in early_tags.items():
            if tag != op.tag:
                self._disagree(op, host, out)
        self.settle(op, now, out)

    def _op(self, seq: int, now: float) -> Op:
        op = self.ops.get(seq)
        if op is None:
            op = self.ops[seq] = Op(self.gid, seq, self.here, now, self.settings.repair_after_s)
            if len(self.hosts) > 1:
                self.next_repair = min(self.next_repair, op.repair_at)
        return op

    def settle(self, op: Op, now: float, out: list[Effect]) -> None:
        """After anything happened to an op: note completion, close it if nobody needs it."""
        if op.held:
            self.held_back.extend((op, rank) for rank in op.held)
            op.held.clear()
        if op.complete and op.seq >= self.done and op.seq not in self.complete:
            self._completed(op, now, out)
        if op.complete:
            self._close(op, out)

    def _completed(self, op: Op, now: float, out: list[Effect]) -> None:
        self.ops_done += 1
        self.complete.add(op.seq)
        while self.done in self.complete:
            self.complete.discard(self.done)
            self.done += 1
        if len(self.hosts) > 1:
            self.next_repair = min(self.next_repair, now + self.settings.repair_after_s)
            plan = op.plan
            assert plan is not None
            if len(plan.spans) > 1:
                self._manifests(op, plan, out)
            eager = plan.result_nbytes >= EAGER_DONE_BYTES
            self.tell_at = min(self.tell_at, now if eager else now + DONE_DELAY_S)

    def _manifests(self, op: Op, plan: Plan, out: list[Effect]) -> None:
        for part in op.view.local if op.view else ():
            digests = [op.have.get((part.index, span)) for span in range(len(plan.spans))]
            if any(digest is None for digest in digests):
                continue  # some of it never left this machine
            root = root_of([digest for digest in digests if digest is not None]).hex()
            times = [(r, at) for ranks, host, at in op.observed if host == self.here for r in ranks]
            message = Manifest(gid=self.hex, seq=op.seq, part=part.index, root=root, observed=times)
            self._to_all(message, out)

    def _close(self, op: Op, out: list[Effect]) -> None:
        if op.unconsumed:
            return
        over = self.broken and self.limit is not None and op.seq >= self.limit[0]
        if not over and self._needed(op):
            return
        del self.ops[op.seq]
        self._let_go(out)
        self.recent.append((op.seq, op))
        if op.view is None or not op.view.solo:
            out.append(CloseOp(self.gid, op.seq))

    def _needed(self, op: Op) -> bool:
        """Whether a local rank or another machine has not come to the end of a complete op."""
        if op.seq >= self.disputed or any(
            alive and rank not in op.final for rank, alive in self.local.items()
        ):
            return True
        others = self.done_there[: self.here] + self.done_there[self.here + 1 :]
        return min(others, default=op.seq + 1) <= op.seq

    def _let_go(self, out: list[Effect]) -> None:
        """Ranks that only give may go on as far as everybody else has followed."""
        while self.held_back and len(self.ops) <= LEAD * self.settings.window:
            op, rank = self.held_back.popleft()
            if op.seq in self.ops:
                op.finish(rank, out)
                if op.complete:
                    self._close(op, out)

    def close_ready(self, out: list[Effect]) -> None:
        """Close what can be closed: another machine went on, or a rank is gone.

        That is complete ops, and any op that nobody here or elsewhere waits for any more.
        """
        abandoned = bool(self.local) and not any(self.local.values())
        for op in list(self.ops.values()):
            if op.complete or abandoned:
                self._close(op, out)

    # -------------------------------------------------------------------- arrivals
    def accepts(self, peer: PeerId, header: ChunkHeader) -> bool:
        """Whether a chunk's bytes should be kept; False for duplicates and for what was never due."""
        host = self.host_of.get(peer)
        if host is None or host == self.here or header.seq < 1:
            return False
        if header.seq >= self.done + FAR_AHEAD * self.settings.window:
            return False
        if header.seq > self.disputed or (self.limit is not None and header.seq >= self.limit[0]):
            return False
        op = self.ops.get(header.seq)
        if op is None:
            return header.seq >= self.done and header.seq not in self.complete
        if op.plan is not None and header.descriptor != op.tag:
            return True  # not to be used, but to be heard of: see ``chunk``
        return op.wanted(header)

    def chunk(self, peer: PeerId, header: ChunkHeader, now: float, out: list[Effect]) -> None:
        """A verified chunk that ``accepts`` said yes to."""
        host = self.host_of[peer]
        op = self.ops.get(header.seq)
        if op is not None and op.plan is not None and header.descriptor != op.tag:
            self._disagree(op, host, out)
            return
        self.other_done(host, header.done, out)
        if op is not None and op.seq not in self.ops:
            return  # that was the last thing it waited for
        op = self._op(header.seq, now)
        if op.plan is None:
            op.early_tags[host] = header.descriptor
        if op.plan is not None and not op.wanted(header):
            self.duplicates += 1
            return
        op.arrived(header, now, out)
        self.settle(op, now, out)

    def rejected(self, peer: PeerId, header: ChunkHeader, now: float, out: list[Effect]) -> None:
        """A damaged chunk: ask another holder, or the same one again; after three, give up by name."""
        op = self.ops.get(header.seq)
        if op is None or op.plan is None or not op.wanted(header):
            return
        key = (int(header.role), header.part, header.index)
        tried = op.rejects.setdefault(key, [])
        tried.append(self.host_of[peer])
        if len(tried) >= PATIENCE_REJECTS:
            names = ", ".join(sorted({self.machine(host) for host in tried}))
            text = (
                f"op {op.seq} {op.plan.descriptor.describe()}: a chunk arrived damaged {len(tried)} times "
                f"from {names}; check that machine's memory, disk and network"
            )
            self.fail(op.seq, "IntegrityError", text, now, out)
            return
        holders = [h for h in range(len(self.hosts)) if h != self.here and h not in tried]
        faithful = header.role == 0 and len(op.plan.part_targets(header.part, header.index)) > 1
        target = holders[0] if holders and faithful else self.host_of[peer]
        self._want(op, target, [key], out)

    def _want(self, op: Op, host: int, keys: list[tuple[int, int, int]], out: list[Effect]) -> None:
        self.repairs_asked += len(keys)
        out.append(Send(self.hosts[host].peer, Want(gid=self.hex, seq=op.seq, items=keys[:256])))

    def other_done(self, host: int, upto: int, out: list[Effect]) -> None:
        """Another machine has completed every op below ``upto``."""
        if upto > self.done_there[host]:
            self.done_there[host] = upto
            self.close_ready(out)

    def manifest(self, peer: PeerId, message: Manifest, now: float, out: list[Effect]) -> None:
        """The root of a contribution, from the machine that made it: must be what was received."""
        op = self.ops.get(message.seq)
        if op is None or op.plan is None or message.part >= len(op.plan.parts):
            return
        digests = [op.have.get((message.part, span)) for span in range(len(op.plan.spans))]
        kept = [digest for digest in digests if digest is not None]
        if len(kept) == len(digests) and root_of(kept).hex() != message.root:
            text = (
                f"op {op.seq} {op.plan.descriptor.describe()}: the contribution of "
                f"{self.machine(self.host_of[peer])} is not the one its manifest names"
            )
            self.fail(op.seq, "IntegrityError", text, now, out)

    # ------------------------------------------------------------------- mismatches
    def _disagree(self, op: Op, host: int, out: list[Effect]) -> None:
        """A machine's chunk belongs to another op than ours of this number: tell it what we called.

        It may think that it is done (a broadcast's source), and so may we. The op stays until it has failed,
        and no chunks of later ones are taken.
        """
        if op.descriptor is None or not op.posted:
            return
        self.disputed = min(self.disputed, op.seq)
        rank = next(iter(op.posted))
        text = op.descriptor.encoded.decode()
        peer = self.hosts[host].peer
        out.append(Send(peer, OpDescriptor(gid=self.hex, seq=op.seq, rank=rank, descriptor=text)))

    def described(self, message: OpDescriptor, now: float, out: list[Effect]) -> None:
        """Another machine says what one of its ranks called as this op."""
        theirs = decode_descriptor(message.descriptor.encode())
        op = self.ops.get(message.seq)
        if op is None or op.descriptor is None or op.descriptor == theirs or not op.posted:
            return
        rank = next(iter(op.posted))
        self.mismatch(message.seq, rank, op.descriptor, message.rank, theirs, now, out)

    def mismatch(
        self, seq: int, a: int, ours: Descriptor, b: int, theirs: Descriptor, now: float, out: list[Effect]
    ) -> None:
        """Two ranks called different operations as op ``seq``."""
        if b < a:
            a, ours, b, theirs = b, theirs, a, ours
        text = (
            f"ranks disagree on op {seq} of group {self.name!r}: rank {a} called {ours.describe()}, "
            f"rank {b} called {theirs.describe()}; all ranks must call the same operation with the same "
            "dtype and shape, in the same order"
        )
        self.fail(seq, "Mismatch", text, now, out)

    # --------------------------------------------------------------------- endings
    def fail(
        self, seq: int, code: str, text: str, now: float, out: list[Effect], *, tell: bool = True
    ) -> None:
        """Every op from ``seq`` on fails, here and (``tell``) on the other machines."""
        if self.limit is not None:
            if self.broken and self.limit[0] <= seq:
                return
            seq = min(seq, self.limit[0])  # what a clean leave has ended does not begin again
        self.limit, self.broken = (seq, code, text), True
        for rank, alive in self.local.items():
            if alive:
                out.append(Fail(self.gid, rank, seq, code, text))
        for op in [op for op in self.ops.values() if op.seq >= seq]:
            # A rank that was told of its complete result may not have read it yet: its bytes stay till then.
            if not (op.complete and op.unconsumed):
                del self.ops[op.seq]
                out.append(CloseOp(self.gid, op.seq))
        if tell:
            self._to_all(self.failure(), out)

    def failure(self) -> GroupFailed:
        """How a broken group failed, for another machine."""
        assert self.limit is not None
        seq, code, text = self.limit
        return GroupFailed(gid=self.hex, seq=seq, code=code, text=text)

    def last_handed_over(self, rank: int) -> int:
        """The last op up to which this machine holds everything that a local rank owes."""
        last = self.next_post.get(rank, 1) - 1
        for seq in sorted(self.ops):
            op = self.ops[seq]
            if seq <= last and op.plan is not None and not op.handed_over(rank):
                return seq - 1
        return last

    def rank_left(self, rank: int, clean: bool, reason: str, now: float, out: list[Effect]) -> None:
        """A local rank takes no further part; its peers on other machines are told."""
        if not self.local.get(rank):
            return
        self.local[rank] = False
        last = self.last_handed_over(rank)
        self._to_all(RankGone(gid=self.hex, rank=rank, last_seq=last, clean=clean, reason=reason[:4000]), out)
        for op in self.ops.values():
            op.forget(rank)
        self.rank_gone(rank, last, clean, reason, now, out)
        self.close_ready(out)

    def rank_gone(
        self, rank: int, last: int, clean: bool, reason: str, now: float, out: list[Effect]
    ) -> None:
        """A rank, here or elsewhere, takes no part in ops after ``last``."""
        self.gone[rank] = last
        verb = "has left the group" if clean else "failed"
        text = f"{self.rank_text(rank)} {verb} after op {last}: {reason}"
        if not clean or any(seq > last and op.posted and not op.complete for seq, op in self.ops.items()):
            self.fail(last + 1, "RankLost", text, now, out, tell=False)
        elif self.limit is None or self.limit[0] > last + 1:
            self.limit = (last + 1, "RankLost", text)

    def peer_gone(self, host: int, reason: str, now: float, out: list[Effect]) -> None:
        """A machine is gone: what it still owes never comes; what it gave stays."""
        if self.done_there[host] < PAST_ALL:
            self.done_there[host] = PAST_ALL
            ranks = self.hosts[host].ranks
            owed = [
                seq
                for seq, op in sorted(self.ops.items())
                if not op.complete and (op.plan is None or host in op.lacking())
            ]
            left = [self.gone[rank] for rank in ranks if rank in self.gone]
            if owed or len(left) < len(ranks):
                first = owed[0] if owed else max(self.done, *self.next_post.values(), 1)
                text = f"{self.machine(host)} is gone: {reason}"
                self.fail(first, "RankLost", text, now, out)
            self.close_ready(out)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do for the group on this machine."""
        return bool(self.local) and not any(self.local.values()) and not self.ops

    # ----------------------------------------------------------------------- time
    @property
    def deadline(self) -> float:
        """When ``tick`` wants to run."""
        return min(self.tell_at, self.next_repair)

    def tick(self, now: float, heard: dict[PeerId, float], out: list[Effect]) -> None:
        """Tell watermarks; ask again for what does not come. ``heard``: last chunk from each peer."""
        if now >= self.tell_at:
            self.tell_at = float("inf")
            for host, peer in enumerate(self.hosts):
                if host != self.here and self.told[host] < self.done and self.done_there[host] < PAST_ALL:
                    self.told[host] = self.done
                    out.append(Send(peer.peer, OpDone(gid=self.hex, upto=self.done)))
        if now >= self.next_repair:
            self._repair(now, heard, out)

    def _repair(self, now: float, heard: dict[PeerId, float], out: list[Effect]) -> None:
        self.next_repair = float("inf")
        quiet_s = self.settings.repair_after_s
        for seq in sorted(self.ops):
            op = self.ops[seq]
            if now >= op.repair_at:
                if op.complete:
                    self._ask_done(seq, out)
                else:
                    self._ask(op, now, heard, quiet_s, out)
                op.repair_wait = min(op.repair_wait * 2, 8 * quiet_s)
                op.repair_at = now + op.repair_wait
            self.next_repair = min(self.next_repair, op.repair_at)

    def _ask_done(self, seq: int, out: list[Effect]) -> None:
        """Somebody has not said that it is past a complete op: its word or ours was lost."""
        for host, there in enumerate(self.hosts):
            if host != self.here and self.done_there[host] <= seq:
                out.append(Send(there.peer, OpDone(gid=self.hex, upto=self.done, ask=True)))

    def _ask(self, op: Op, now: float, heard: dict[PeerId, float], quiet_s: float, out: list[Effect]) -> None:
        for host, keys in sorted(op.lacking().items()):
            if now - heard.get(self.hosts[host].peer, float("-inf")) >= quiet_s:
                self._want(op, host, keys[:64], out)
        if op.plan is not None:
            whole = [part for part, left in op.part_left.items() if left == 0]
            out.append(Publish(Have(peer=self.me, gid=self.hex, seq=op.seq, parts=whole)))

    def _to_all(self, message: GroupFailed | Manifest | RankGone, out: list[Effect]) -> None:
        for index, host in enumerate(self.hosts):
            if index != self.here:
                out.append(Send(host.peer, message))

    def joined(self, out: list[Effect]) -> None:
        """Every machine is ready: ops may run."""
        for rank, alive in self.local.items():
            if alive:
                out.append(Joined(self.gid, rank))

    def close(self, out: list[Effect]) -> None:
        """Drop the group and what is left of its ops; tell the others that it needs nothing any more."""
        for index, host in enumerate(self.hosts):
            if index != self.here and self.done_there[index] < PAST_ALL:
                out.append(Send(host.peer, OpDone(gid=self.hex, upto=PAST_ALL)))
        out.extend(CloseOp(self.gid, seq) for seq in self.ops)
        self.ops.clear()
        out.append(CloseGroup(self.gid))
