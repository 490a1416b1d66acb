"""Messages between simulated ranks: what a driver does with the core's effects, and what ranks get."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from frogzmq.dataplane.mailbuffers import MailBuffers
from frogzmq.errors import FrogError, from_code
from frogzmq.machine import Effect
from frogzmq.mailing import (
    AskBytes,
    CloseMail,
    DeliverMail,
    FailMail,
    FailReceive,
    MailKey,
    MailMade,
    MailPosted,
    MailRead,
    MailReady,
    MailTaken,
    MakeMail,
    OpenMail,
    ReceivePosted,
)

if TYPE_CHECKING:
    from frogzmq.sim.cluster import Cluster
    from frogzmq.sim.driver import SimPeer

HASH_S = 1e-5


class SimMail:
    """The messages that one simulated peer holds."""

    def __init__(self, peer: SimPeer) -> None:
        self.peer, self.post = peer, peer.cluster.mail
        self.buffers = MailBuffers(None)
        self.calls: dict[type[Effect], Callable[[Any], None]] = {
            AskBytes: self._ask, MakeMail: self._make, OpenMail: self._open, DeliverMail: self._deliver,
            CloseMail: self._close, FailReceive: self._fail_receive, FailMail: self._fail_mail,
        }  # fmt: skip

    def _ask(self, effect: AskBytes) -> None:
        self.peer.world.after(HASH_S, lambda: self.post.give(effect.key))

    def _make(self, effect: MakeMail) -> None:
        digest = self.buffers.digest(effect.key, effect.start, effect.stop)
        if digest is not None:
            self.peer.world.after(HASH_S, lambda: self.peer.event(MailMade(effect.key, effect.index, digest)))

    def _open(self, effect: OpenMail) -> None:
        self.buffers.open(effect.key, effect.size, effect.chunk_bytes)

    def _deliver(self, effect: DeliverMail) -> None:
        if effect.upto == effect.size:
            data = bytes(self.buffers.whole(effect.key))
            self.post.got(self.peer, effect, data)

    def _close(self, effect: CloseMail) -> None:
        self.buffers.close(effect.key)
        self.post.done[effect.key] = True

    def _fail_receive(self, effect: FailReceive) -> None:
        self.post.failed[effect.rank, effect.n] = from_code(effect.code, effect.text)

    def _fail_mail(self, effect: FailMail) -> None:
        self.post.unsent[effect.key] = from_code(effect.code, effect.text)


class PostOffice:
    """What simulated ranks send and receive: ``send``, ``receive``, and what came of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._withheld: dict[MailKey, bytes] = {}
        self.read_small_s = self.read_s = 1e-5
        """How long a rank takes to read a small and a large message."""
        self.inbox: dict[tuple[int, int], tuple[int, bytes]] = {}
        """(rank, receive) -> (source, bytes)."""
        self.failed: dict[tuple[int, int], FrogError] = {}
        self.unsent: dict[MailKey, FrogError] = {}
        self.done: dict[MailKey, bool] = {}
        """Messages whose bytes nobody needs any more, on either machine."""

    def send(
        self, src: int, dst: int, data: bytes, tag: int = 0, dtype: str = "uint8", *, withhold: bool = False
    ) -> MailKey:
        """A rank sends; with ``withhold`` it gives the bytes only when asked."""
        n = self._sent[src, dst] = self._sent.get((src, dst), 0) + 1
        key = MailKey(self.cluster.gid, src, dst, n)
        peer = self.cluster.host_of[src]
        if withhold:
            self._withheld[key] = data
        else:
            peer.mail.buffers.put(key, data)
        peer.event(MailPosted(key, tag, dtype, len(data), not withhold))
        return key

    def give(self, key: MailKey) -> None:
        """A rank is asked for bytes that it withheld."""
        data = self._withheld.pop(key, None)
        if data is not None and key not in self.done:
            peer = self.cluster.host_of[key.src]
            peer.mail.buffers.put(key, data)
            peer.event(MailReady(key, len(data)))

    def receive(self, rank: int, src: int, size: int, tag: int = 0, dtype: str = "uint8") -> tuple[int, int]:
        """A rank receives (``src`` -1: from whomever); the result names its entry of ``inbox``."""
        n = self._received[rank] = self._received.get(rank, 0) + 1
        self.cluster.host_of[rank].event(ReceivePosted(self.cluster.gid, rank, n, src, tag, dtype, size))
        return rank, n

    def got(self, peer: SimPeer, effect: DeliverMail, data: bytes) -> None:
        """A rank has a whole message before it."""
        rank = effect.key.dst
        assert (rank, effect.n) not in self.inbox, "a receive gets one message"
        self.inbox[rank, effect.n] = (effect.key.src, data)
        gid = self.cluster.gid
        if effect.inline:
            count = self._read[rank] = self._read.get(rank, 0) + 1
            peer.world.after(self.read_small_s, lambda: peer.event(MailRead(gid, rank, count)))
        else:
            peer.world.after(self.read_s, lambda: peer.event(MailTaken(gid, rank, effect.n)))
