"""``frogzmq peek --receipts``: what peers have folded into what, and the first op at which they differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frogzmq.cli.ask import Peer
from frogzmq.content.ledger import Difference, first_difference

MAX_ROWS = 20
"""Latest ops of a peer that are shown to people; JSON has all."""


def show_receipts(directories: Sequence[Path], *, as_json: bool) -> Difference | None:
    """Print the receipts of the peers of these folders; the first difference between or within them."""
    answers = []
    for directory in directories:
        with Peer(directory) as peer:
            answers.append(peer.receipts())
    found = first_difference([answer["receipts"] for answer in answers])
    if as_json:
        print(json.dumps({"peers": answers, "difference": asdict(found) if found else None}, indent=2))
    else:
        _print(answers, found)
    return found


def _print(answers: Sequence[dict[str, Any]], found: Difference | None) -> None:
    from rich.console import Console
    from rich.markup import escape

    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, highlight=False)
    for answer in answers:
        console.print(_table(answer))
    if found is not None:
        console.print(f"[red]receipts differ: {escape(found.text)}[/]")
    elif any(answer["receipts"] for answer in answers):
        console.print("[green]no difference[/]")
    else:
        console.print("no receipts: start the job with FROGZMQ_RECEIPTS=1 or frogzmq.Options(receipts=True)")


def _table(answer: dict[str, Any]) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    rows = answer["receipts"]
    skipped = answer["left_off"] + max(0, len(rows) - MAX_ROWS)
    title = f"receipts of peer {escape(str(answer['me']['name']))}"
    title += f" (the latest {MAX_ROWS}; {skipped} earlier ones not shown)" if skipped else ""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in ("group", "op", "what", "state", "parts", "result", "receipt", "ranks that got it"):
        table.add_column(column, overflow="fold")
    for row in rows[-MAX_ROWS:]:
        parts = row["parts"]
        known = sum(part["root"] is not None for part in parts)
        strange = {rank for rank, _ in (row["said"] or {"odd": []})["odd"]}
        got = ",".join(rank for rank in row["got"] if int(rank) not in strange)
        odd = ",".join(map(str, sorted(strange)))
        table.add_row(
            escape(str(row["group"])), str(row["seq"]), escape(str(row["what"])), str(row["state"]),
            f"{known}/{len(parts)}", _short(row["result"]), _short(row["receipt"]),
            (got or "-") + (f" [red]not {odd}[/]" if odd else ""),
        )  # fmt: skip
    return table


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "-"
