"""Small values that every layer shares. No I/O, no third-party imports."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType

PeerId = NewType("PeerId", str)
"""Stable name of a machine's peer: 16 hex characters derived from its public key."""

GroupId = NewType("GroupId", bytes)
"""16 bytes naming one process group of one job (session nonce and group name, hashed)."""

Digest = NewType("Digest", bytes)
"""A 32-byte BLAKE3 digest."""

ConnId = NewType("ConnId", int)
"""A rank's connection to its own machine's peer; meaningful inside that peer only."""


class OpKind(IntEnum):
    """What a collective does. Append only: the numbers are on the wire."""

    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    BARRIER = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALL_TO_ALL = 9


class ReduceOp(IntEnum):
    """How contributions are combined. Append only: the numbers are on the wire."""

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    PREMUL_SUM = 9
    """A sum of contributions that each rank multiplied by its own factor before it gave them."""


class Role(IntEnum):
    """What a chunk is a piece of: a contribution (``PART``), the folded result, or a message (``MAIL``)."""

    PART = 0
    RESULT = 1
    MAIL = 2


class Mode(StrEnum):
    """Who folds. All three give the same bits."""

    AUTO = "auto"
    SHARD = "shard"
    FAITHFUL = "faithful"


class Order(StrEnum):
    """The association in which contributions are folded; a property of the job, never of the route."""

    MACHINE = "machine"
    RANK = "rank"
    GLOO = "gloo"
