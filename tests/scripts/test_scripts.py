"""Every text script in this folder does what it has recorded (``pytest --rewrite`` records anew)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.script import check_script

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path, rewrite: bool) -> None:
    recorded, fresh = check_script(path, rewrite=rewrite)
    assert fresh == recorded


def test_there_are_scripts():
    assert len(SCRIPTS) >= 6
