"""One message as its caller sees it, and the blocks of the arena that messages stand in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frogzmq.client.leases import Block, LeasePool
from frogzmq.client.ops import Bytes
from frogzmq.errors import DeadlineExceeded, FrogError, WireError
from frogzmq.mailing import ANY_RANK

if TYPE_CHECKING:
    from frogzmq.client.mail import Mailbox

__all__ = ["ANY_RANK", "GivenBlocks", "Letter", "Receiving", "Sending", "again"]


def again(error: FrogError) -> FrogError:
    """A fresh copy: raising one exception twice would chain its tracebacks without bound."""
    return error if isinstance(error, WireError) else type(error)(str(error))


class Letter:
    """A message: ``done`` once its memory belongs to the caller again, or it failed.

    Its time (``timeout_s``) counts from when somebody waits for it: a receive may be posted long before.
    """

    __slots__ = (
        "box", "deadline", "done", "dtype", "error", "finish", "n", "rank", "size", "tag", "timeout_s",
        "watchers",
    )  # fmt: skip

    def __init__(
        self, box: Mailbox, rank: int, tag: int, dtype: str, size: int, timeout_s: float | None
    ) -> None:
        self.box, self.rank, self.tag, self.dtype, self.size = box, rank, tag, dtype, size
        self.timeout_s = box.group.timeout_s if timeout_s is None else timeout_s
        self.deadline = float("inf")
        self.n = 0
        self.done = False
        self.error: FrogError | None = None
        self.finish: Callable[[], None] | None = None
        self.watchers: list[Callable[[Letter], None]] = []

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when done; raise the message's error, or ``DeadlineExceeded`` after ``timeout_s``.

        Without ``timeout_s`` the message's own time counts, and running out of it breaks the group.
        """
        if not self.done:
            self.box.wait(self, timeout_s)
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        """Take in what has arrived, without waiting, and say whether the message is done."""
        if not self.done:
            self.box.pump()
        return self.done

    def add_done_callback(self, watcher: Callable[[Letter], None]) -> None:
        """Call ``watcher(message)`` once when done, at once if it is; it must not block."""
        if not self.box.watch(self, watcher):
            watcher(self)

    def release(self) -> None:
        """Let go of the caller's memory."""
        self.finish = None

    def describe(self) -> str:
        """For people."""
        raise NotImplementedError

    def late(self, waited_s: float, explanation: str) -> DeadlineExceeded:
        """Build the error of a wait that ran out."""
        missing = f"; {explanation}" if explanation else ""
        group = self.box.group
        return DeadlineExceeded(
            f"Timed out after {waited_s:g} s: timeout while waiting for {self.describe()} of group "
            f"{group.name!r} on rank {group.rank}{missing}"
        )


class Sending(Letter):
    """A message that this rank sends."""

    __slots__ = ("asked", "data", "told")

    def __init__(
        self, box: Mailbox, rank: int, tag: int, dtype: str, size: int, timeout_s: float | None
    ) -> None:
        super().__init__(box, rank, tag, dtype, size, timeout_s)
        self.data: Bytes | None = None
        self.told = self.asked = False
        """The peer knows of it; its receiver waits for its bytes."""

    def release(self) -> None:
        """Let go of the caller's memory."""
        self.finish, self.data = None, None

    def describe(self) -> str:
        """``send of 16 bytes of float32 with tag 3 to rank 1 (process 17 on node-b)``."""
        whom = self.box.group.rank_text(self.rank)
        return f"send of {self.size} bytes of {self.dtype} with tag {self.tag} to {whom}"


class Receiving(Letter):
    """A message that this rank receives; ``source`` is the sender's rank once it is done."""

    __slots__ = ("sinks", "source", "taken")

    def __init__(
        self, box: Mailbox, rank: int, tag: int, dtype: str, size: int, timeout_s: float | None
    ) -> None:
        super().__init__(box, rank, tag, dtype, size, timeout_s)
        self.sinks: Sequence[Bytes] = ()
        self.taken = 0
        """Bytes that have been copied into the sinks."""
        self.source = rank

    def put(self, data: Bytes) -> None:
        """Copy the next bytes of the message into the sinks."""
        start = 0
        for sink in self.sinks:
            stop = start + len(sink)
            if self.taken < stop and len(data):
                at = self.taken - start
                take = min(stop - self.taken, len(data))
                np.copyto(sink[at : at + take], data[:take])
                data = data[take:]
                self.taken += take
            start = stop

    def release(self) -> None:
        """Let go of the caller's memory."""
        self.finish, self.sinks = None, ()

    def describe(self) -> str:
        """``recv of 16 bytes of float32 with tag 3 from rank 1 (process 17 on node-b)``."""
        whom = "any rank" if self.rank == ANY_RANK else self.box.group.rank_text(self.rank)
        return f"recv of {self.size} bytes of {self.dtype} with tag {self.tag} from {whom}"


class GivenBlocks:
    """Blocks of the arena in which messages of this process stand that somebody may still read.

    They outlive the group that they were sent in. Safe from any thread.
    """

    def __init__(self, leases: LeasePool) -> None:
        self._leases = leases
        self._lock = threading.Lock()
        self._blocks: dict[tuple[int, tuple[int, int]], Block] = {}
        self._writing: dict[tuple[int, tuple[int, int]], bool] = {}
        """Blocks that are being written, and whether the peer needs them no more meanwhile."""
        self._held: dict[int, tuple[int, int]] = {}

    def held(self, handle: int) -> tuple[int, int]:
        """Blocks of one group, and bytes in them."""
        return self._held.get(handle, (0, 0))

    def _count(self, handle: int, blocks: int, nbytes: int) -> None:
        before = self.held(handle)
        self._held[handle] = (before[0] + blocks, before[1] + nbytes)
        if not self._held[handle][0]:
            del self._held[handle]

    def hold(self, handle: int, key: tuple[int, int], block: Block) -> None:
        """Keep ``block`` for message ``key`` until both ``done`` and ``written`` were called."""
        with self._lock:
            self._blocks[handle, key] = block
            self._writing[handle, key] = False
            self._count(handle, 1, block.size)

    def written(self, handle: int, key: tuple[int, int]) -> None:
        """Nobody writes into the message's block any more."""
        with self._lock:
            over = self._writing.pop((handle, key), False)
        if over:
            self.done(handle, key)

    def done(self, handle: int, key: tuple[int, int]) -> bool:
        """The peer needs the message no more; whether a block has come free."""
        with self._lock:
            if (handle, key) in self._writing:
                self._writing[handle, key] = True
                return False
            block = self._blocks.pop((handle, key), None)
            if block is None:
                return False
            self._count(handle, -1, -block.size)
        self._leases.give_back(block)
        return True
