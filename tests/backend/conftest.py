"""Runtime folders of simulated machines; a started peer ends by itself when its last rank has gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.ranks import machine_dirs


@pytest.fixture
def machines() -> Iterator[Callable[[int], list[Path]]]:
    """``machines(n)``: private runtime folders, removed afterwards."""
    made: list[Path] = []

    def make(count: int) -> list[Path]:
        made.extend(machine_dirs(count))
        return made[-count:]

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)
