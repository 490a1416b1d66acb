"""WIRE.md says what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from frogzmq.wire import limits, messages, ranks

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("wiredoc", ROOT / "tools" / "wiredoc.py")
assert _spec is not None and _spec.loader is not None  # noqa: PT018
wiredoc = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wiredoc)


def test_it_is_up_to_date() -> None:
    assert (ROOT / "WIRE.md").read_text() == wiredoc.document(), "run python tools/wiredoc.py"


def test_it_names_every_kind_and_every_limit() -> None:
    text = wiredoc.document()
    kinds = [(cls.KIND, cls.__name__) for cls in (*messages.CONTROL, *ranks.JSON)]
    kinds += [(kind, cls.__name__) for kind, cls, _ in ranks.BINARY]
    for kind, name in kinds:
        assert f"### {kind} {name}" in text
    for name in vars(limits):
        assert not name.isupper() or f"| `{name}` | {getattr(limits, name):,} |" in text
