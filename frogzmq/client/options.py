"""``frogzmq.Options``: what a user may choose for a group. Needs no torch, so configurations can hold it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from frogzmq.config import group_options
from frogzmq.errors import ConfigError
from frogzmq.wire.messages import GroupOptions

NAMES = ("mode", "order", "receipts", "verify")


class Options:
    """Options of one process group, as ``pg_options`` of ``init_process_group`` or ``new_group``.

    ``mode``: who folds (``auto``, ``shard``, ``faithful``; default FROGZMQ_MODE, else ``auto``).
    ``order``: association of the fold (``machine``, ``rank``; default FROGZMQ_ORDER, else ``machine``).
    ``receipts``: keep a receipt of every operation (default FROGZMQ_RECEIPTS, else no).
    ``verify``: compare receipts before a rank goes on (default FROGZMQ_VERIFY, else no).
    All ranks of the group must give the same. ``ConfigError`` names what is allowed.
    """

    __slots__ = NAMES

    def __init__(
        self,
        mode: str | None = None,
        order: str | None = None,
        receipts: bool | None = None,
        verify: bool | None = None,
        **unknown: object,
    ) -> None:
        for name in unknown:
            close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.3)
            nearest = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(
                f"frogzmq.Options: unknown option {name!r}{nearest}; allowed: {', '.join(NAMES)}"
            )
        self.mode = mode
        self.order = order
        self.receipts = receipts
        self.verify = verify
        # The given values are checked where they are written; the environment's, when the group is made.
        group_options({}, mode, order, receipts, verify)

    def resolve(self, env: Mapping[str, str] | None = None) -> GroupOptions:
        """Fill in the environment's values and the defaults."""
        return group_options(env, *self._values())

    def __repr__(self) -> str:
        given = zip(NAMES, self._values(), strict=True)
        return f"frogzmq.Options({', '.join(f'{name}={value!r}' for name, value in given)})"

    def _values(self) -> tuple[str | None, str | None, bool | None, bool | None]:
        return self.mode, self.order, self.receipts, self.verify

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Options):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())


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
