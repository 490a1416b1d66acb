"""A peer's snapshot as tables for a terminal. Pure: a dict in, rich renderables out.

A snapshot may come from another release, so a key that is missing shows as ``-`` and is never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

MAX_PEERS = 40
MAX_GROUPS = 12
MAX_OPS = 8
MAX_RECENT = 3
"""How many rows of each a view shows; what is left out is counted."""

_STATES = {
    "up": "green", "running": "green", "self": "dim", "known": "dim",
    "slow": "yellow", "lost": "yellow", "forming": "yellow", "dialling": "yellow",
    "down": "red", "broken": "red",
}  # fmt: skip


def render(snapshot: Row) -> RenderableType:
    """The whole view."""
    names = peer_names(snapshot)
    blocks: list[RenderableType] = [peer_panel(snapshot), peers_table(snapshot)]
    groups = _rows(snapshot, "groups")
    blocks += [group_block(group, names) for group in groups[:MAX_GROUPS]]
    if len(groups) > MAX_GROUPS:
        blocks.append(Text(f"... and {len(groups) - MAX_GROUPS} more groups", style="dim"))
    if not groups:
        blocks.append(Text("no job on this machine", style="dim"))
    blocks += [arena_line(_dict(snapshot, "arena")), counters_line(_dict(snapshot, "counters"))]
    return Group(*blocks)


def peer_names(snapshot: Row) -> dict[str, str]:
    """Names for people by peer id: this peer, those it knows, and the machines of its groups."""
    rows = [{"name": about(snapshot).get("name"), "peer": about(snapshot).get("id")}]
    rows += _rows(snapshot, "peers")
    rows += [host for group in _rows(snapshot, "groups") for host in _rows(group, "hosts")]
    return {str(row["peer"]): str(row["name"]) for row in rows if row.get("peer") and row.get("name")}


def about(snapshot: Row) -> dict[str, Any]:
    """The peer itself: its identity, what its process costs, and whatever is said of it under ``peer``."""
    me, process = _dict(snapshot, "me"), _dict(snapshot, "process")
    facts = {"id": me.get("peer"), **me, **process}
    facts |= {key: snapshot[key] for key in ("protocol", "uptime_s", "runtime_dir") if key in snapshot}
    return facts | _dict(snapshot, "peer")


def peer_panel(snapshot: Row) -> RenderableType:
    """Who answers: name, process, addresses, age and cost."""
    me = about(snapshot)
    endpoints = me.get("endpoints") or []
    lines = [
        f"pid {_text(me, 'pid')} · release {_text(me, 'version')} · protocol {_text(me, 'protocol')} · "
        f"up {seconds(me.get('uptime_s'))} · {size(me.get('rss_bytes'))} resident · "
        f"cpu {seconds(me.get('cpu_s'))}",
        f"listens at {escape(', '.join(map(str, endpoints)) or '-')}",
    ]
    if me.get("runtime_dir"):
        lines.append(f"runtime dir {escape(_text(me, 'runtime_dir'))}")
    title = f"[bold]peer {escape(_text(me, 'name'))}[/] {_text(me, 'id')}"
    return Panel("\n".join(lines), title=title, title_align="left", expand=False)


def peers_table(snapshot: Row) -> RenderableType:
    """Other machines: state, path, round trip and rates."""
    rows = _rows(snapshot, "peers")
    if not rows:
        return Text("no other peer known", style="dim")
    table = _table("peers", "state", "endpoint", "RTT", "heard", "sent/s", "received/s", title="peers")
    for row in rows[:MAX_PEERS]:
        table.add_row(
            escape(str(row.get("name") or row.get("peer") or "?")),
            _state(row),
            escape(_text(row, "endpoint")),
            seconds(row.get("rtt_s")),
            _ago(_first(row, "heard_s", "heard_s_ago")),
            size(_first(row, "sent_bytes_s", "sent_bytes_per_s")),
            size(_first(row, "received_bytes_s", "received_bytes_per_s")),
        )
        why = _why(row)
        if why:
            table.add_row("", Text(why, style="yellow"))
    if len(rows) > MAX_PEERS:
        table.caption = f"... and {len(rows) - MAX_PEERS} more"
    return table


def group_block(group: Row, names: Mapping[str, str]) -> RenderableType:
    """A process group, its ops in flight, and the last ones that completed."""
    places = " · ".join(
        f"{escape(str(host.get('name') or host.get('peer') or '?'))} {_ranks(host.get('ranks'))}"
        for host in _rows(group, "hosts")
    )
    head = (
        f"[bold]group {escape(_text(group, 'name'))}[/] of job {escape(_text(group, 'job'))}: "
        f"{_text(group, 'size')} ranks · mode {_text(group, 'mode')} · order {_text(group, 'order')} · "
        f"{_text(group, 'ops_done')} ops done · "
    )
    title = Text.from_markup(head).append_text(_state(group))
    blocks: list[RenderableType] = [Text(""), title, Text(f"  ranks: {places or '-'}", style="dim")]
    if group.get("error"):
        blocks.append(Text(f"  {group['error']}", style="red"))
    blocks.append(ops_table(group, names))
    mail = _rows(_dict(group, "mail"), "waiting")
    if mail:
        blocks.append(mail_table(mail, int(_dict(group, "mail").get("waits") or len(mail))))
    recent = _rows(group, "recent")[-MAX_RECENT:]
    for op in reversed(recent):
        text = f"  done {op.get('seq', '-')} {op.get('what', '-')}: {arrivals(op, names)}"
        blocks.append(Text(text, style="dim"))
    return Group(*blocks)


def ops_table(group: Row, names: Mapping[str, str]) -> RenderableType:
    """Ops in flight, oldest first, with the order in which contributions were observed."""
    ops = _rows(group, "ops")
    if not ops:
        return Text("  no op in flight", style="dim")
    table = _table("op", "what", "mode", "age", "pieces", "observed, in order of arrival", "missing")
    for op in ops[:MAX_OPS]:
        missing = op.get("missing")
        table.add_row(
            _text(op, "seq"),
            escape(_text(op, "what")),
            _text(op, "mode"),
            seconds(op.get("age_s")),
            f"{_text(op, 'pieces_done')}/{_text(op, 'pieces')}",
            escape(arrivals(op, names)),
            Text(_ranks(missing) if missing else "none", style="yellow" if missing else "green"),
        )
    total = int(group.get("ops_in_flight") or len(ops))
    if total > MAX_OPS:
        table.caption = f"... and {total - MAX_OPS} more in flight"
    return table


def mail_table(rows: list[dict[str, Any]], total: int) -> RenderableType:
    """Messages between single ranks, and receives, that wait; oldest first."""
    table = _table("rank", "waits", "tag", "size", "dtype", "since")
    for row in rows[:MAX_OPS]:
        other = row.get("peer_rank")
        whom = "from any rank" if other == -1 else f"{'from' if row.get('what') == 'recv' else 'to'} {other}"
        table.add_row(
            _text(row, "rank"), f"{_text(row, 'what')} {whom}", _text(row, "tag"), size(row.get("bytes")),
            escape(_text(row, "dtype")), seconds(row.get("age_s")),
        )  # fmt: skip
    if total > MAX_OPS:
        table.caption = f"... and {total - MAX_OPS} more messages"
    return table


def arrivals(op: Row, names: Mapping[str, str]) -> str:
    """``0-1 here +0.2ms > 2-3 home-b +31ms``: whose contribution was observed when, earliest first."""
    seen = sorted(_rows(op, "observed"), key=lambda row: float(row.get("at_s") or 0.0))
    words = []
    for row in seen:
        peer = str(row.get("peer", "?"))
        where = "here" if row.get("local") else names.get(peer, peer)
        words.append(f"{_ranks(row.get('ranks'))} {where} +{seconds(row.get('at_s'))}")
    return " > ".join(words) or "nothing yet"


def arena_line(arena: Row) -> RenderableType:
    """How full the shared memory is."""
    if not arena:
        return Text("arena: -", style="dim")
    places = _rows(arena, "segments") or _rows(arena, "places")
    used = _first(arena, "used_bytes")
    if used is None and places:
        used = sum(int(_first(place, "bytes", "used_bytes") or 0) for place in places)
    where = ", ".join(str(_first(place, "path", "directory") or "?") for place in places)
    text = (
        f"arena: {size(arena.get('leased_bytes'))} leased, {size(used)} used of at most "
        f"{size(arena.get('max_bytes'))}" + (f" in {where}" if where else "")
    )
    line = Text(text)
    if arena.get("fallback"):
        line.append(" (fallback: shared memory was too small)", style="yellow")
    return line


def counters_line(counters: Row) -> RenderableType:
    """Counters that are not zero; bytes as sizes."""
    words = []
    for name, value in counters.items():
        if not value:
            continue
        shown = size(value) if "bytes" in name else str(value)
        if isinstance(value, Mapping):
            shown = ", ".join(f"{key} {n}" for key, n in value.items())
        words.append(f"{name.replace('_', ' ')} {shown}")
    return Text("counters: " + (" · ".join(words) or "all zero"))


def seconds(value: object) -> str:
    """A duration: ``0.35ms``, ``31ms``, ``2.4s``, ``3m 12s``, ``5h 03m``."""
    if not isinstance(value, (int, float)):
        return "-"
    if value < 1:
        return f"{value * 1e3:.2f}ms" if value < 0.01 else f"{value * 1e3:.0f}ms"
    if value < 60:
        return f"{value:.1f}s"
    if value < 3600:
        return f"{int(value) // 60}m {int(value) % 60:02d}s"
    return f"{int(value) // 3600}h {int(value) // 60 % 60:02d}m"


def size(value: object) -> str:
    """A number of bytes with a binary unit."""
    if not isinstance(value, (int, float)):
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _ago(value: object) -> str:
    return f"{seconds(value)} ago" if isinstance(value, (int, float)) else "-"


def _state(row: Row) -> Text:
    state = str(row.get("state", "-"))
    return Text(state, style=_STATES.get(state, ""))


def _why(row: Row) -> str:
    """What went wrong with the path, where something did."""
    if row.get("state") in ("up", "self"):
        return ""
    tried = row.get("tried")
    words = [str(row["reason"])] if row.get("reason") else []
    if isinstance(tried, Mapping):
        words += [f"{endpoint}: {why}" for endpoint, why in tried.items() if why]
    return "; ".join(words)


def _ranks(ranks: object) -> str:
    """``0-3,7``: ranks ascending, runs joined."""
    if not isinstance(ranks, Iterable) or isinstance(ranks, str):
        return "-"
    runs: list[list[int]] = []
    for rank in sorted(int(rank) for rank in ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    return "-" if value is None or value == "" else str(value)


def _first(row: Row, *keys: str) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _dict(row: Row, key: str) -> dict[str, Any]:
    value = row.get(key)
    return dict(value) if isinstance(value, Mapping) else {}


def _rows(row: Row, key: str) -> list[dict[str, Any]]:
    value = row.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
