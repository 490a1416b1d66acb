"""``frogzmq peek``: the live state of a peer, once or again and again, for people or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from frogzmq.cli.ask import Peer

Snapshot = dict[str, Any]


def peek(directory: Path, *, once: bool, as_json: bool, interval_s: float) -> None:
    """Show the peer of ``directory`` until it stops or the user does.

    JSON comes indented with ``once`` and otherwise as one line per look. Without a terminal to draw on, the
    view is printed once.
    """
    with Peer(directory) as peer:
        if as_json:
            for snapshot in _looks(peer, once, interval_s):
                print(json.dumps(snapshot, indent=2 if once else None), flush=True)
        elif once or not sys.stdout.isatty():
            _print(peer.snapshot())
        else:
            _live(peer, interval_s)


def _looks(peer: Peer, once: bool, interval_s: float) -> Iterator[Snapshot]:
    yield peer.snapshot()
    while not once:
        time.sleep(interval_s)
        yield peer.snapshot()


def _print(snapshot: Snapshot) -> None:
    from rich.console import Console

    from frogzmq.cli.view import render

    # Without a terminal rich assumes 80 columns and would fold every row.
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(render(snapshot))


def _live(peer: Peer, interval_s: float) -> None:
    from rich.live import Live

    from frogzmq.cli.view import render

    with Live(render(peer.snapshot()), screen=True, auto_refresh=False) as live:
        _until_interrupted(lambda: live.update(render(peer.snapshot()), refresh=True), interval_s)


def _until_interrupted(look: Callable[[], None], interval_s: float) -> None:
    try:
        while True:
            time.sleep(interval_s)
            look()
    except KeyboardInterrupt:
        return
