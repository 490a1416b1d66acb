"""``python -m frogzmq.bench``."""

from __future__ import annotations

from frogzmq.bench.main import main

if __name__ == "__main__":
    main()
