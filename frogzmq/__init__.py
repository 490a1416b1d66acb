"""A torch.distributed backend over a ZeroMQ gossip fabric. Importing this loads neither torch nor zmq.

Where torch is loaded already, importing this registers the backend ``frogzmq``; else torch does so by
itself (entry point) at the end of ``import torch``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frogzmq.backend.receipts import compare_fingerprints, compare_receipts, fingerprint, receipts
    from frogzmq.client import Client
    from frogzmq.client.options import Options
    from frogzmq.errors import (
        ConfigError,
        DeadlineExceeded,
        DuplicateIdentity,
        FrogError,
        GroupBroken,
        IntegrityError,
        Mismatch,
        PeerUnreachable,
        RankLost,
        StoreFull,
        VersionMismatch,
        WireError,
    )

__version__ = "0.1.0"

__all__ = [
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DuplicateIdentity",
    "FrogError",
    "GroupBroken",
    "IntegrityError",
    "Mismatch",
    "Options",
    "PeerUnreachable",
    "RankLost",
    "StoreFull",
    "VersionMismatch",
    "WireError",
    "__version__",
    "compare_fingerprints",
    "compare_receipts",
    "fingerprint",
    "install",
    "receipts",
    "register",
]

_HOMES = {
    "Client": "frogzmq.client",
    "Options": "frogzmq.client.options",
    "compare_fingerprints": "frogzmq.backend.receipts",
    "compare_receipts": "frogzmq.backend.receipts",
    "fingerprint": "frogzmq.backend.receipts",
    "receipts": "frogzmq.backend.receipts",
}


def register() -> None:
    """Make ``init_process_group("frogzmq")`` known to torch; harmless when called again. Imports torch."""
    from frogzmq.backend.register import register as register_with_torch

    register_with_torch()


def install(*, as_gloo: bool | None = None) -> None:
    """Register the backend, and let it stand behind the name "gloo" in this process (or no longer).

    ``as_gloo``: True, False, or None for what FROGZMQ_AS_GLOO says (1: yes; unset: leave it as it is). All
    ranks of a job must agree on it. Imports torch.
    """
    register()
    if as_gloo is None:
        from frogzmq.config import as_gloo_from_environment

        as_gloo = as_gloo_from_environment()
    if as_gloo is not None:
        from frogzmq.backend.standin import stand_in, step_aside

        (stand_in if as_gloo else step_aside)()


def _register_backend() -> None:
    """Entry point ``torch.distributed.backends``."""
    register()


def _autoload() -> None:
    """Run at the end of ``import torch``; an exception here would make that import fail, so none leaves."""
    # `config` would load pydantic, which makes `import torch` longer than anybody would bear.
    environ = os.environ  # noqa: TID251
    if environ.get("FROGZMQ_AUTOLOAD") == "0":
        return
    try:
        if environ.get("FROGZMQ_AS_GLOO"):
            install()
        else:
            register()
    except Exception as error:
        with contextlib.suppress(Exception):  # where warnings are errors
            warnings.warn(f"frogzmq is not ready for this process: {error}", RuntimeWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    """Hand out the public names without importing what they need until somebody asks."""
    if name not in __all__:
        raise AttributeError(f"module 'frogzmq' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "frogzmq.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A torch that is still being imported calls `_autoload` when it is complete.
if getattr(getattr(sys.modules.get("torch"), "distributed", None), "Backend", None) is not None:
    _autoload()
