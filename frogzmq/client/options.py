"""``frogzmq.Options``: what a user may choose for a group. Needs no torch, so configurations can hold it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from frogzmq.config import group_options
from frogzmq.errors import ConfigError
from frogzmq.wire.messages import GroupOptions

NAMES = ("mode", "order")


class Options:
    """Options of one process group, as ``pg_options`` of ``init_process_group`` or ``new_group``.

    ``mode``: who folds (``auto``, ``shard``, ``faithful``; default FROGZMQ_MODE, else ``auto``).
    ``order``: association of the fold (``machine``, ``rank``; default FROGZMQ_ORDER, else ``machine``).
    All ranks of the group must give the same. ``ConfigError`` names what is allowed.
    """

    __slots__ = NAMES

    def __init__(self, mode: str | None = None, order: str | None = None, **unknown: object) -> None:
        for name in unknown:
            close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.3)
            nearest = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(
                f"frogzmq.Options: unknown option {name!r}{nearest}; allowed: {', '.join(NAMES)}"
            )
        self.mode = mode
        self.order = order
        # The given values are checked where they are written; the environment's, when the group is made.
        group_options({}, mode, order)

    def resolve(self, env: Mapping[str, str] | None = None) -> GroupOptions:
        """Fill in the environment's values and the defaults."""
        return group_options(env, self.mode, self.order)

    def __repr__(self) -> str:
        return f"frogzmq.Options(mode={self.mode!r}, order={self.order!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Options):
            return NotImplemented
        return (self.mode, self.order) == (other.mode, other.order)

    def __hash__(self) -> int:
        return hash((self.mode, self.order))


def options_from(given: object) -> Options:
    """Take ``pg_options`` as users write it: ``Options``, a mapping of its names, or nothing."""
    if given is None:
        return Options()
    if isinstance(given, Options):
        return given
    if isinstance(given, Mapping):
        return Options(**{str(name): value for name, value in given.items()})
    raise ConfigError(
        f"pg_options: expected frogzmq.Options or a dict with {', '.join(NAMES)}, got {type(given).__name__}"
    )
