"""Every error that frogzmq raises on purpose.

::

    FrogError
    +-- ConfigError        a setting is wrong: says which, where it came from, what is allowed
    +-- WireError          bytes from elsewhere break the protocol
    |   +-- VersionMismatch   the other side speaks another protocol version
    |   +-- IntegrityError    bytes do not match their digest
    +-- StoreFull          no room for a tensor: says where, how much is needed and how much is free
    +-- PeerUnreachable    this machine's peer, or another machine, cannot be reached
    +-- DuplicateIdentity  two living peers or ranks claim one name
    +-- GroupBroken        a process group cannot go on
    |   +-- Mismatch          ranks called different operations
    |   +-- RankLost          a rank died, left or failed
    +-- DeadlineExceeded   an operation did not finish in its time

At the torch surface these are raised as subclasses of ``torch.distributed.DistBackendError`` with the
same names (``frogzmq.backend.errors``). A bug of our own is an ``AssertionError``, never one of these.
"""

from __future__ import annotations


class FrogError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(FrogError):
    """A setting is unknown or wrong."""


class WireError(FrogError):
    """Bytes received from elsewhere break the protocol."""


class VersionMismatch(WireError):
    """The other side speaks another protocol version."""

    def __init__(self, ours: int, theirs: int, who: str = "the other side") -> None:
        self.ours = ours
        self.theirs = theirs
        super().__init__(
            f"protocol version mismatch: this side speaks {ours}, {who} speaks {theirs}; "
            "install the same frogzmq release on both machines"
        )


class IntegrityError(WireError):
    """Bytes do not match the digest that names them."""


class StoreFull(FrogError):
    """There is no room for a tensor in the arena."""


class PeerUnreachable(FrogError):
    """A peer cannot be reached."""


class DuplicateIdentity(FrogError):
    """Two living processes claim the same peer or rank."""


class GroupBroken(FrogError):
    """A process group cannot go on."""


class Mismatch(GroupBroken):
    """Ranks of a group called different operations, shapes, dtypes or options."""


class RankLost(GroupBroken):
    """A rank that an operation needs has died, left or failed."""


class DeadlineExceeded(FrogError):
    """An operation did not finish in its time."""


BY_CODE: dict[str, type[FrogError]] = {
    cls.__name__: cls
    for cls in (
        FrogError, ConfigError, WireError, IntegrityError, StoreFull, PeerUnreachable,
        DuplicateIdentity, GroupBroken, Mismatch, RankLost, DeadlineExceeded,
    )
}  # fmt: skip
"""Codes that travel between processes, so that a rank raises the class its peer meant."""


def from_code(code: str, text: str) -> FrogError:
    """Rebuild an error that another process described as ``code`` and ``text``."""
    return BY_CODE.get(code, FrogError)(text)
