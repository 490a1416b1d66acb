"""Flow control of chunks: how much may be under way to each peer.

A sender keeps at most ``window`` units of chunks on the link to one peer that the peer has not yet taken
off it; the rest waits here, earlier ops first. The receiver says how much it has taken *in all*
(``Credit``), so a lost credit is healed by the next one. Without this, chunks would pile up in ZeroMQ's
queues, where control messages would wait behind them and memory would have no bound. Credits are given
when a chunk is verified, not when it is used: what an op needs later never blocks what it needs now.
"""

from __future__ import annotations

from heapq import heappop, heappush

from frogzmq.machine import Effect, Send, SendChunk
from frogzmq.types import PeerId
from frogzmq.wire.messages import ChunkHeader, Credit

MIN_COST = 4096
"""Even an empty chunk costs this much, so that the window bounds messages as well as bytes."""


def cost_of(header: ChunkHeader) -> int:
    """Units that a chunk takes of the window: its bytes, at least ``MIN_COST``."""
    return max(header.size, MIN_COST)


class _Lane:
    __slots__ = ("forgiven", "queue", "said", "sent", "taken_here", "taken_there")

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, SendChunk]] = []
        self.sent = 0
        self.forgiven = 0  # under way when a link broke: arrived or lost, nobody can tell
        self.taken_there = 0
        self.taken_here = 0
        self.said = 0

    @property
    def under_way(self) -> int:
        return self.sent - self.forgiven - self.taken_there


class Transfer:
    """Windows and queues towards all peers. Pure; the caller passes effects through."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._lanes: dict[PeerId, _Lane] = {}
        self._count = 0

    def _lane(self, peer: PeerId) -> _Lane:
        lane = self._lanes.get(peer)
        if lane is None:
            lane = self._lanes[peer] = _Lane()
        return lane

    def send(self, effect: SendChunk, out: list[Effect]) -> None:
        """Send a chunk now if the window allows, else queue it (by op number)."""
        lane = self._lane(effect.peer)
        if not lane.queue and lane.under_way < self.window:
            lane.sent += cost_of(effect.header)
            out.append(effect)
            return
        self._count += 1
        heappush(lane.queue, (effect.header.seq, self._count, effect))

    def _drain(self, lane: _Lane, out: list[Effect]) -> None:
        while lane.queue and lane.under_way < self.window:
            effect = heappop(lane.queue)[2]
            lane.sent += cost_of(effect.header)
            out.append(effect)

    def credited(self, peer: PeerId, taken: int, out: list[Effect]) -> None:
        """``peer`` has taken ``taken`` units off our link to it in all."""
        lane = self._lane(peer)
        lane.taken_there = min(max(lane.taken_there, taken), lane.sent)
        self._drain(lane, out)

    def took(self, peer: PeerId, header: ChunkHeader, out: list[Effect]) -> None:
        """A chunk from ``peer`` was taken off its link: owe it credit, and say so now and then."""
        lane = self._lane(peer)
        lane.taken_here += cost_of(header)
        if lane.taken_here - lane.said >= self.window // 8:
            lane.said = lane.taken_here
            out.append(Send(peer, Credit(cost=lane.taken_here)))

    def reconnected(self, peer: PeerId, out: list[Effect]) -> None:
        """Our link to ``peer`` is new: what was under way has arrived or is lost. Repeat our credit."""
        lane = self._lane(peer)
        lane.forgiven += max(lane.under_way, 0)
        if lane.taken_here:
            lane.said = lane.taken_here
            out.append(Send(peer, Credit(cost=lane.taken_here)))
        self._drain(lane, out)

    def forget(self, peer: PeerId) -> None:
        """``peer`` is gone, with everything queued for it."""
        self._lanes.pop(peer, None)

    def drop_op(self, gid: bytes, seq: int, part: int | None = None) -> None:
        """Forget queued chunks (of one part) of an op that failed or closed."""
        for lane in self._lanes.values():
            if lane.queue:
                kept = [
                    row
                    for row in lane.queue
                    if row[0] != seq or row[2].header.gid != gid or part not in (None, row[2].header.part)
                ]
                if len(kept) != len(lane.queue):
                    kept.sort(key=lambda row: row[:2])
                    lane.queue = kept

    def queued(self, peer: PeerId, gid: bytes, seq: int, key: tuple[int, int, int]) -> bool:
        """Whether that chunk still waits here for credit (so a repair would only duplicate it)."""
        lane = self._lanes.get(peer)
        return lane is not None and any(
            seq == row[0]
            and row[2].header.gid == gid
            and (int(row[2].header.role), row[2].header.part, row[2].header.index) == key
            for row in lane.queue
        )

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Units under way and chunks queued, by peer."""
        return {
            str(peer): {"under_way": max(lane.under_way, 0), "queued": len(lane.queue)}
            for peer, lane in self._lanes.items()
        }
