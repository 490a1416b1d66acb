"""Repair: what did not come, or came damaged, is asked for again; watermarks that got lost are repeated.

Chunks are pushed along the plan. Each machine knows exactly what it lacks, so nothing waits for a message
that says so; ``Want`` is sent only when nothing has come for a while.
"""

from __future__ import annotations

from frogzmq.content.manifest import root_of
from frogzmq.machine import Effect, Publish, Send
from frogzmq.proto.failing import PAST_ALL, Failing
from frogzmq.proto.op import Op
from frogzmq.types import PeerId
from frogzmq.wire.messages import ChunkHeader, Have, Manifest, OpDone, Want

PATIENCE_REJECTS = 3
"""Damaged copies of one chunk before the op fails and names who sent them."""


class Repair(Failing):
    """Asking for what is late or damaged."""

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

    def manifest(self, peer: PeerId, message: Manifest, now: float, out: list[Effect]) -> None:
        """The root of a contribution, from the machine that made it: must be what was received."""
        op = self.ops.get(message.seq)
        if op is None or op.plan is None or message.part >= len(op.plan.parts):
            return
        digests = [op.have.get((message.part, span)) for span in range(len(op.plan.cuts[message.part]))]
        kept = [digest for digest in digests if digest is not None]
        if len(kept) == len(digests) and root_of(kept).hex() != message.root:
            text = (
                f"op {op.seq} {op.plan.descriptor.describe()}: the contribution of "
                f"{self.machine(self.host_of[peer])} is not the one its manifest names"
            )
            self.fail(op.seq, "IntegrityError", text, now, out)

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
