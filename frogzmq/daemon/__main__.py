"""``python -m frogzmq.daemon``: run a peer in the foreground."""

from __future__ import annotations

import gc
import os
import sys

LEAN = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's linear algebra, which a peer never uses, starts no threads: 0.15 s
    "PYDANTIC_DISABLE_PLUGINS": "__all__",  # the installed packages are not searched for plugins: 0.03 s
}
"""Has to be in the environment before anything is loaded; what is there already is kept."""


def start() -> int:
    """Load what a peer needs, in a way that has it ready soon, and run it."""
    gc.disable()  # nothing that is loaded here is garbage: 0.05 s; ``main`` switches it on again
    for name, value in LEAN.items():
        os.environ.setdefault(name, value)  # noqa: TID251
    from frogzmq.daemon.main import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
