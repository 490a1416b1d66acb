"""Options and fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record the text scripts' output anew")
    parser.addoption("--exhaustive", action="store_true", help="every combination (half an hour more)")
    parser.addoption(
        "--repeats", action="store_true", help="repeat what must hold every time as often as users did"
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture
def exhaustive(request: pytest.FixtureRequest) -> None:
    """Skips the test unless ``--exhaustive`` asks for it."""
    if not request.config.getoption("--exhaustive"):
        pytest.skip("only with --exhaustive")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Rank processes with torch and peers, started once and shared by all tests that run jobs on them."""
    pool = Pool()
    yield pool
    pool.close()
