"""``python -m frogzmq.daemon``: run a peer in the foreground."""

from __future__ import annotations

import sys

from frogzmq.daemon.main import main

if __name__ == "__main__":
    sys.exit(main())
