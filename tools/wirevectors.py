"""Write the golden vectors of the wire tests anew: ``python tools/wirevectors.py``.

Only where the protocol changes on purpose, together with ``frogzmq.wire.messages.PROTOCOL``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.wire_samples import VECTORS, vectors


def main() -> None:
    """Write one file per message kind and remove files of kinds that are gone."""
    VECTORS.mkdir(exist_ok=True)
    wanted = vectors()
    for path in VECTORS.glob("*.bin"):
        if path.name not in wanted:
            path.unlink()
    for name, data in wanted.items():
        (VECTORS / name).write_bytes(data)
    print(f"{len(wanted)} vectors in {VECTORS}")


if __name__ == "__main__":
    main()
