"""Options and fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record the text scripts' output anew")
    parser.addoption(
        "--repeats", action="store_true", help="repeat what must hold every time as often as users did"
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Rank processes with torch and peers, started once and shared by all tests that run jobs on them."""
    pool = Pool()
    yield pool
    pool.close()
