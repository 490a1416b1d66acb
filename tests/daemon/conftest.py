"""Fixtures for tests with real peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fleet import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Real peers below the test's folder; none is left at its end."""
    with Fleet(tmp_path) as fleet:
        yield fleet
