"""The errors of ``frogzmq.errors`` as torch's callers expect them: all are ``DistBackendError`` too.

Each class here is also the class of the same name in ``frogzmq.errors``, so either can be caught.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from frogzmq import errors


class FrogError(errors.FrogError, DistBackendError):
    """Base of all errors raised on purpose, at the torch surface."""


class ConfigError(FrogError, errors.ConfigError):
    """A setting is unknown or wrong."""


class WireError(FrogError, errors.WireError):
    """Bytes received from elsewhere break the protocol."""


class VersionMismatch(WireError, errors.VersionMismatch):
    """The other side speaks another protocol version."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)


class IntegrityError(WireError, errors.IntegrityError):
    """Bytes do not match the digest that names them."""


class StoreFull(FrogError, errors.StoreFull):
    """There is no room for a tensor in the arena."""


class PeerUnreachable(FrogError, errors.PeerUnreachable):
    """A peer cannot be reached."""


class DuplicateIdentity(FrogError, errors.DuplicateIdentity):
    """Two living processes claim the same peer or rank."""


class GroupBroken(FrogError, errors.GroupBroken):
    """A process group cannot go on."""


class Mismatch(GroupBroken, errors.Mismatch):
    """Ranks of a group called different operations, shapes, dtypes or options."""


class RankLost(GroupBroken, errors.RankLost):
    """A rank that an operation needs has died, left or failed."""


class DeadlineExceeded(FrogError, errors.DeadlineExceeded):
    """An operation did not finish in its time."""


class UnsupportedError(FrogError, NotImplementedError):
    """The backend does not have this operation (yet)."""


class UnsupportedType(FrogError, TypeError):
    """The operation does not exist for this dtype, or this kind of tensor."""


class BadTensor(FrogError, ValueError):
    """A tensor has a shape, layout or place that the operation cannot use."""


_SURFACE: dict[str, type[FrogError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError, WireError, VersionMismatch, IntegrityError, StoreFull, PeerUnreachable,
        DuplicateIdentity, GroupBroken, Mismatch, RankLost, DeadlineExceeded,
    )
}  # fmt: skip


def surface(error: errors.FrogError) -> FrogError:
    """A fresh error of the torch surface with the class name and text of ``error``."""
    if isinstance(error, FrogError):
        return error
    return _SURFACE.get(type(error).__name__, FrogError)(str(error))
