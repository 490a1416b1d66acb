"""Write anew what of ``DistributedTest`` passes for torch's Gloo: ``python tests/torchsuite/record.py``."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from harness import Suite


def main() -> None:
    """Three minutes on two cores."""
    passing = {}
    for ranks in (2, 3, 4):
        outcomes = Suite(ranks, "gloo", ours=False).run()
        passing[str(ranks)] = sorted(name for name, each in outcomes.items() if each.outcome == "pass")
        print(f"{ranks} ranks: {len(passing[str(ranks)])} of {len(outcomes)} pass", file=sys.stderr)
    record = {"torch": version("torch"), "passing": passing}
    Path(__file__).with_name("gloo.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
