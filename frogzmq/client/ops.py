"""One collective as its caller sees it, and the answers to other requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from frogzmq.content.manifest import Tally
from frogzmq.descriptor import Descriptor
from frogzmq.errors import DeadlineExceeded, FrogError

if TYPE_CHECKING:
    from frogzmq.client.group import GroupHandle

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A one-dimensional contiguous array of bytes that stands for memory of the caller's."""


class Reply:
    """The answer to one request that is not an op."""

    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: object = None
        self.error: FrogError | None = None

    def resolve(self, value: object = None, error: FrogError | None = None) -> None:
        """Set the answer, once, in the leader's thread."""
        if not self.done:
            self.value, self.error = value, error
            self.done = True


class Op:
    """A collective that was called: ``done`` once its result stands in the sinks, or it failed.

    ``src`` has ``descriptor.gives(rank, size)`` bytes (or is None: the rank gives none), and is read until it
    has been copied, which is before ``post`` returns unless the op had to queue. ``sinks`` receive the
    result's bytes, one after the other, ``descriptor.gets(rank, size)`` in all (none where that is -1); they
    are written as the result arrives. ``finish`` runs once after that, in whichever thread receives.
    """

    __slots__ = (
        "deadline", "descriptor", "done", "error", "fence", "finish", "group", "seq", "sinks", "src", "taken",
        "tally", "timeout_s", "watchers",
    )  # fmt: skip

    def __init__(
        self,
        group: GroupHandle,
        descriptor: Descriptor,
        src: Bytes | None,
        sinks: Sequence[Bytes],
        timeout_s: float,
    ) -> None:
        self.group = group
        self.descriptor = descriptor
        self.src = src
        self.sinks = sinks
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.finish: Callable[[], None] | None = None
        self.fence = False
        """The op is held back until all earlier ops of the group are done here."""
        self.seq = 0
        self.taken = 0
        """Bytes of the result that have been copied into the sinks."""
        self.tally: Tally | None = None
        """Where a receipt is kept: the root of what has been copied so far."""
        self.done = False
        self.error: FrogError | None = None
        self.watchers: list[Callable[[Op], None]] | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when done; raise the op's error, or ``DeadlineExceeded`` after ``timeout_s``.

        Without ``timeout_s`` the op's own time counts, and running out of it breaks the group: the error
        says who has not arrived. A shorter wait that runs out leaves the op going on.
        """
        if not self.done:
            self.group.wait(self, timeout_s)
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        """Take in what has arrived, without waiting, and say whether the op is done."""
        if not self.done:
            self.group.pump()
        return self.done

    def add_done_callback(self, watcher: Callable[[Op], None]) -> None:
        """Call ``watcher(op)`` once when done, at once if it is; in a receiving thread: it must not block."""
        if not self.group.watch(self, watcher):
            watcher(self)

    def put(self, data: Bytes) -> None:
        """Copy the next bytes of the result into the sinks (``taken`` says from where on)."""
        sinks = self.sinks
        if len(sinks) == 1:
            np.copyto(sinks[0][self.taken : self.taken + len(data)], data)
            self.taken += len(data)
            return
        start = 0
        for sink in sinks:
            stop = start + len(sink)
            if self.taken < stop and len(data):
                at = self.taken - start
                take = min(stop - self.taken, len(data))
                np.copyto(sink[at : at + take], data[:take])
                data = data[take:]
                self.taken += take
            start = stop

    def hash_since(self, before: int) -> Tally:
        """Count what stands in the sinks from byte ``before`` to ``taken``, read back from there."""
        tally = self.tally
        if tally is None:
            tally = self.tally = Tally()
        start = 0
        for sink in self.sinks:
            stop = start + len(sink)
            if before < stop and start < self.taken:
                tally.feed(sink[max(before - start, 0) : self.taken - start])
            start = stop
        return tally

    def describe(self) -> str:
        """For people: ``op 7 of group 'default': all_reduce(SUM) of float32[4]``."""
        return f"op {self.seq} of group {self.group.name!r}: {self.descriptor.describe()}"

    def late(self, waited_s: float, explanation: str) -> DeadlineExceeded:
        """Build the error of a wait that ran out."""
        missing = f"; {explanation}" if explanation else ""
        return DeadlineExceeded(
            f"Timed out after {waited_s:g} s: timeout while waiting for {self.describe()} "
            f"on rank {self.group.rank}{missing}"
        )
