"""Every number that the sans-IO core goes by: sizes, bounds and times, with their reasons.

Names and defaults are for any network; ``LAN`` and ``WAN`` trade what is said beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from frogzmq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Immutable settings of one peer's core; ``ConfigError`` for values that cannot work together."""

    chunk_bytes: int = 1 << 20
    """Largest span or piece that travels as one chunk. Larger: fewer headers; smaller: finer pipelining."""
    small_bytes: int = 64 << 10
    """``auto`` uses one direct exchange up to this size: (N-2)/N of a tensor costs less than a round trip."""
    window: int = 64
    """Ops in flight per group; bounds every per-op table."""
    credit_bytes: int = 32 << 20
    """Chunk bytes on the way to one peer. Full speed needs rate * RTT: 32 MiB fill 1 Gbit/s at 250 ms."""
    repair_after_s: float = 0.5
    """A chunk that is due and has not moved for this long is asked for by ``Want``."""
    ping_interval_s: float = 1.0
    """One small message each way per attached peer and interval."""
    slow_after_s: float = 3.0
    """Silence after which a peer is shown as slow; nothing fails."""
    silent_dead_after_s: float = 12.0
    """Silence after which a peer is dead and its ops fail: price of surviving that long a stall."""
    lost_after_s: float = 2.5
    """A closed connection must be back within this time, or its peer is dead."""
    probe_timeout_s: float = 1.5
    """How long the holder of an identity has to answer a newcomer's claim (below ``hello_timeout_s``)."""
    hello_timeout_s: float = 2.0
    """Dial to Welcome at one address; grows with every round (TCP + CURVE take about 4 round trips)."""
    reach_timeout_s: float = 20.0
    """All addresses together, before a peer counts as unreachable."""
    redial_min_s: float = 1.0
    """First pause before dialling a lost or configured peer again; doubles up to ``redial_max_s``."""
    redial_max_s: float = 30.0
    """Longest pause: what a peer that comes back waits at worst. 50 dead peers cost 2 dials a second."""
    redial_for_s: float = 600.0
    """How long a peer that no configuration names is dialled after it was lost."""
    max_peers: int = 4096
    """Peers kept at once; beyond it the oldest dead one makes room, or the newcomer is refused."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(f"{field.name} = {getattr(self, field.name)!r}: must be above zero")
        pairs = (
            ("ping_interval_s", "slow_after_s"),
            ("slow_after_s", "silent_dead_after_s"),
            ("probe_timeout_s", "hello_timeout_s"),
            ("hello_timeout_s", "reach_timeout_s"),
            ("redial_min_s", "redial_max_s"),
            ("chunk_bytes", "credit_bytes"),
        )
        for small, large in pairs:
            if getattr(self, small) > getattr(self, large):
                raise ConfigError(
                    f"{small} = {getattr(self, small)!r} is above {large} = {getattr(self, large)!r}"
                )


LAN = replace(
    CoreSettings(),
    # Round trips below 1 ms: a chunk that has not moved for 0.2 s (200 RTT) is lost. Price: a peer that
    # is merely starved of CPU for that long is asked twice.
    repair_after_s=0.2,
    # 5 missed pings of 1 s. Price: a machine that stalls for 6 s (swap, suspend) fails its ops.
    silent_dead_after_s=6.0,
    redial_max_s=10.0,
)
WAN = replace(
    CoreSettings(),
    # Half the default: a 20 Mbit uplink moves 512 KiB in 0.2 s, so small ops wait no longer than that
    # behind a chunk. Price: twice the headers and hashes' fixed cost (about 2 %).
    chunk_bytes=512 << 10,
    # 4 * RTT at 300 ms, and room for a queue of chunks ahead. Price: a lost chunk is noticed later.
    repair_after_s=1.5,
    # 3 to 4 round trips of 300 ms for TCP and CURVE, twice over for one lost SYN (1 s).
    hello_timeout_s=4.0,
    slow_after_s=5.0,
    silent_dead_after_s=20.0,
    lost_after_s=5.0,
    reach_timeout_s=25.0,
)
