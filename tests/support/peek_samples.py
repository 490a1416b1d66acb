"""Snapshots as a peer gives them: a full one, and smaller ones made from it."""

from __future__ import annotations

from typing import Any


def full_snapshot() -> dict[str, Any]:
    """A peer named alpha with one machine up, one down, and a group with two ops in flight."""
    return {
        "protocol": 1,
        "uptime_s": 192.0,
        "me": {
            "peer": "a" * 16, "name": "alpha", "instance": "i1", "version": "0.1.0",
            "endpoints": ["tcp://192.0.2.1:29650"],
        },
        "process": {"pid": 4242, "rss_bytes": 50 << 20, "cpu_s": 1.5},
        "peers": [
            {
                "peer": "b" * 16, "name": "beta", "state": "up", "endpoint": "tcp://192.0.2.2:29650",
                "rtt_s": 0.031, "heard_s_ago": 0.4, "sent_bytes_per_s": 3 << 20, "received_bytes_per_s": 0,
            },
            {
                "peer": "c" * 16, "name": "gamma", "state": "down", "endpoint": "", "rtt_s": None,
                "heard_s_ago": None, "reason": "silent for 10 s", "tried": {"tcp://192.0.2.3:1": "refused"},
            },
        ],
        "groups": [
            {
                "gid": "0" * 32, "job": "run-7", "name": "default", "size": 4, "mode": "auto",
                "order": "machine", "state": "running", "error": "", "ops_done": 118,
                "hosts": [
                    {"peer": "a" * 16, "name": "alpha", "ranks": [0, 1]},
                    {"peer": "b" * 16, "name": "beta", "ranks": [2, 3]},
                ],
                "ops_in_flight": 2,
                "ops": [
                    {
                        "seq": 119, "what": "all_reduce(SUM) of float32[1000]", "mode": "faithful",
                        "age_s": 0.05, "pieces": 8, "pieces_done": 3,
                        "observed": [
                            {"ranks": [0, 1], "peer": "a" * 16, "local": True, "at_s": 0.0312},
                            {"ranks": [2, 3], "peer": "b" * 16, "local": False, "at_s": 0.0021},
                        ],
                        "missing": [],
                    },
                    {
                        "seq": 120, "what": "not called here yet", "mode": "", "age_s": 0.01, "pieces": 0,
                        "pieces_done": 0, "observed": [], "missing": [0, 1, 3],
                    },
                ],
                "mail": {
                    "sent": 3, "received": 1, "waits": 2,
                    "waiting": [
                        {
                            "what": "send", "rank": 0, "peer_rank": 3, "tag": 17, "bytes": 5 << 20,
                            "dtype": "bfloat16", "age_s": 2.0,
                        },
                        {
                            "what": "recv", "rank": 1, "peer_rank": -1, "tag": 4, "bytes": 4,
                            "dtype": "int32", "age_s": 1.0,
                        },
                    ],
                },
                "recent": [
                    {
                        "seq": 118, "what": "barrier",
                        "observed": [{"ranks": [2], "peer": "b" * 16, "local": False, "at_s": 0.5}],
                    }
                ],
            }
        ],
        "arena": {
            "max_bytes": 1 << 33, "leased_bytes": 64 << 20, "fallback": True,
            "places": [{"directory": "/dev/shm/frogzmq-1", "used_bytes": 128 << 20}],
        },
        "counters": {
            "chunks_sent": 17, "chunk_bytes_sent": 1 << 20, "drops": 0, "rejected_by_peer": {"b": 2},
        },
    }  # fmt: skip
