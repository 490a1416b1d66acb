"""Repair: what did not come, or came damaged, is asked for again; watermarks that got lost are repeated.

Chunks are pushed along the plan. Each machine knows exactly what it lacks, so nothing waits for a message
that says so; ``Want`` is sent only when nothing has come for a while, to any machine that
holds what it names.
"""

from __future__ import annotations

from frogzmq.content.manifest import root_of
from frogzmq.machine import Effect, Publish, Send
from frogzmq.proto.failing import Failing
from frogzmq.proto.holding import PAST_ALL, due
from frogzmq.proto.op import Key, Op
from frogzmq.types import PeerId
from frogzmq.wire.messages import ChunkHeader, Have, Manifest, OpDone, Want

PATIENCE_REJECTS = 3
"""Damaged copies of one chunk before the op fails and names who sent them."""
AT_ONCE = 64
"""Chunks that are asked for in one go."""


class Repair(Failing):
    """Asking for what is late or damaged."""

    def rejected(self, peer: PeerId, header: ChunkHeader, now: float, out: list[Effect]) -> None:
        """A damaged chunk: ask another holder, or the same one again; after three, give up by name."""
        op = self.ops.get(header.seq)
        if op is None or op.plan is None or not op.wanted(header):
            return
        key: Key = (int(header.role), header.part, header.index)
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
        known = [*self.others_with(op, key), *due(op.plan, key)]
        others = [h for h in known if h not in (self.here, *tried) and self.done_there[h] < PAST_ALL]
        self._want(op, others[0] if others else self.host_of[peer], [key], out)

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
        first = min(self.tell_at, self.next_repair)
        return min(first, *(at for at, _, _ in self.orphans.values())) if self.orphans else first

    def tick(self, now: float, heard: dict[PeerId, float], out: list[Effect]) -> None:
        """Tell watermarks; ask again for what does not come. ``heard``: last chunk from each peer."""
        if now >= self.tell_at:
            self.tell_at = float("inf")
            for host, peer in enumerate(self.hosts):
                if host != self.here and self.told[host] < self.done and self.done_there[host] < PAST_ALL:
                    self.told[host] = self.done
                    out.append(Send(peer.peer, OpDone(gid=self.hex, upto=self.done)))
        if self.orphans:
            self.give_up(now, out)
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
                    if seq >= self.done:  # else the watermark says so
                        self._announce(op, out)
                    if op.watched and self.ledger is not None:
                        self.ledger.ask(seq, out)
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
        """Ask for what has not come: whoever announced that it holds it and who makes it, in turn.

        A machine that sends us chunks is not asked, nor is anyone in its place: the rest is on the way, and a
        second copy of it would only take its room.
        """
        for maker, keys in sorted(op.lacking().items()):
            alive = self.done_there[maker] < PAST_ALL
            if alive and now - heard.get(self.hosts[maker].peer, float("-inf")) < quiet_s:
                continue
            turn = op.asked[maker] = op.asked.get(maker, -1) + 1
            wants: dict[int, list[Key]] = {}
            for key in keys[:AT_ONCE]:
                whom = self.others_with(op, key) + [maker] * alive
                if whom:
                    wants.setdefault(whom[turn % len(whom)], []).append(key)
            for host, wanted in sorted(wants.items()):
                self._want(op, host, wanted, out)
        self._announce(op, out)

    def _announce(self, op: Op, out: list[Effect]) -> None:
        """Say what is held here of an op that is late: another may lack just that."""
        view = op.view
        if view is None:
            return
        whole = [part for part, left in op.part_left.items() if left == 0]
        results = any(view.receives) and all(map(int.__le__, view.receives, op.piece_done))
        out.append(Publish(Have(peer=self.me, gid=self.hex, seq=op.seq, parts=whole, results=results)))

    def have(self, host: int, message: Have, now: float) -> None:
        """Another machine announces what it holds; if that is what is waited for, it is asked at once."""
        if self.announced(host, message):
            op = self.ops[message.seq]
            op.repair_at = self.next_repair = now
