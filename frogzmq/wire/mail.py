"""How a message between two ranks is named in the fixed header of its chunks.

A chunk's header has no fields for two ranks, a tag and a dtype; they ride in ``seq``, ``part`` and
``descriptor``. Numbers above ``MAIL_SEQ`` never meet those of collectives.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from blake3 import blake3

from frogzmq.dtypes import DTYPES
from frogzmq.wire.limits import MAIL_NUMBER

MAIL_SEQ = 1 << 62
_SHIFT = MAIL_NUMBER.bit_length() - 1
_ADDRESS = struct.Struct("<I4s")


def mail_seq(rank: int, number: int) -> int:
    """``seq`` of message ``number`` to ``rank``; also how a rank's receive is named when it asks why."""
    return MAIL_SEQ | rank << _SHIFT | number


def split_seq(seq: int) -> tuple[int, int]:
    """Rank and number in a ``seq`` that ``mail_seq`` made."""
    return (seq & (MAIL_SEQ - 1)) >> _SHIFT, seq & (MAIL_NUMBER - 1)


@lru_cache(maxsize=256)
def mark_of(dtype: str) -> bytes:
    """Four bytes that stand for a dtype's name."""
    return blake3(dtype.encode()).digest(4)


@lru_cache(maxsize=4096)
def address(tag: int, dtype: str) -> bytes:
    """The eight bytes of ``ChunkHeader.descriptor``."""
    return _ADDRESS.pack(tag, mark_of(dtype))


@lru_cache(maxsize=4096)
def read_address(raw: bytes) -> tuple[int, str]:
    """Tag and dtype; a mark that this release does not know stands for itself."""
    tag, mark = _ADDRESS.unpack(raw)
    return tag, next((name for name in DTYPES if mark_of(name) == mark), f"dtype #{mark.hex()}")
