"""One table of every bound on what another process may send or ask for.

A remote number is compared with its row here before it sizes anything. Sizes are in bytes, ``*_CHARS``
in characters, the rest are counts.
"""

from __future__ import annotations

HEAD_BYTES = 4
"""Head of every peer-to-peer frame 1: magic, protocol version, kind."""

FRAMES = 2
"""Frames in one peer-to-peer message: a control message has one, a chunk has two."""

CHUNK_BYTES = 4 << 20
"""Largest payload of one chunk, whatever chunk size is configured."""

CONTROL_BYTES = 256 << 10
"""Largest control message with its head; every message that its model allows stays below."""

FRAME_BYTES = CHUNK_BYTES
"""Largest single frame: the value of ``ZMQ_MAXMSGSIZE``; libzmq cuts off a sender of a larger one."""

DATAGRAM_BYTES = 64 << 10
"""Largest rank-to-peer datagram. Receive with one byte more, so that a longer one is seen as such."""

INLINE_BYTES = 32 << 10
"""Contributions and results up to this size ride inside the datagram; larger ones use the arena."""

JSON_PIECE_BYTES = 48 << 10
"""JSON in one datagram; longer JSON is split over several."""

JSON_BYTES = 16 << 20
"""Largest JSON message on the local socket, all pieces together."""

DESCRIPTOR_BYTES = 48 << 10
"""Canonical bytes of one op descriptor: uneven splits are in it."""

POST_ROOM = DATAGRAM_BYTES - 64
"""Descriptor and inline payload of one Post together; a longer payload uses the arena."""

DIMS = 64
"""Dimensions of one tensor."""

TENSOR_BYTES = 1 << 48
"""Largest contribution, result or lease that can be named."""

WINDOW = 64
"""Ops of one group that a rank may have posted and not finished."""

MEMBERS = 4096
"""Ranks listed in one message: the largest group."""

RANKS = 1 << 16
"""Rank and part numbers are below this."""

ENDPOINTS = 32
"""Endpoints in one list of a peer's identity."""

ENDPOINT_CHARS = 128
"""One endpoint."""

NAME_CHARS = 256
"""Names, versions, keys, error codes."""

TEXT_CHARS = 4096
"""A reason or a group's options."""

EXPLAIN_CHARS = 64 << 10
"""A text from the peer to its own rank: failures, notes, explanations."""

PATH_CHARS = 4096
"""One file path."""

SEGMENTS = 1024
"""Files of one arena."""

WANT_ITEMS = 256
"""Chunks asked for in one ``Want``."""

MAIL_ITEMS = 256
"""Messages named in one ``MailSeen`` or ``MailAsk``."""

MAIL_WINDOW = 1 << 16
"""Messages that a rank may have announced to one other rank and not seen taken; its receives in a group."""

MAIL_UNREAD = 64
"""Messages inside datagrams on their way to a rank that it has not said it read."""

MAIL_NUMBER = 1 << 40
"""Messages between two ranks are numbered below this."""

DTYPE_CHARS = 24
"""Name of a message's element type."""

LINK_ROWS = 1024
"""Rows of one ``Links`` announcement."""


RECEIPT_ROWS = 1024
"""Parts that a machine gave, or ranks that got something else, in one ``OpReceipt``."""


def clip(text: str, limit: int = TEXT_CHARS) -> str:
    """Shorten ``text`` to ``limit`` characters, with ``...`` at its end where something was cut."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def goes_inline(nbytes: int, descriptor_bytes: int) -> bool:
    """Whether a contribution travels in its ``Post``; a longer one uses the arena."""
    return nbytes <= INLINE_BYTES and nbytes + descriptor_bytes <= POST_ROOM
