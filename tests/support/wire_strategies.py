"""Hypothesis strategies for every message, derived from the models themselves.

A message added to the catalogue is therefore tested without a change here.
"""

from __future__ import annotations

import enum
import typing
from typing import Any

import annotated_types as at
from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from frogzmq.types import Digest, GroupId, Role
from frogzmq.wire import limits, ranks
from frogzmq.wire.messages import CONTROL, PROTOCOL, ChunkHeader

TEXT = st.characters(codec="utf-8")
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 60), 1 << 60)
    | st.floats(-1e9, 1e9)
    | st.text(TEXT, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(TEXT, max_size=4), inner, max_size=3),
    max_leaves=8,
)
LIST_LIMIT = 4  # lists stay short here; tests of the bounds use full ones


def model(cls: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Return valid instances of a model."""
    fields = {name: _annotation(info.annotation, info.metadata) for name, info in cls.model_fields.items()}
    if "protocol" in fields:
        fields["protocol"] = st.just(PROTOCOL)
    return st.builds(cls, **fields)


def _annotation(kind: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        flat: list[Any] = []
        for item in args[1:]:
            flat += item.metadata if isinstance(item, FieldInfo) else [item]
        return _annotation(args[0], flat)
    if origin is list:
        return st.lists(_annotation(args[0], []), max_size=LIST_LIMIT)
    if origin is tuple:
        return st.tuples(*(_annotation(arg, []) for arg in args))
    if origin is dict and args == (str, JsonValue):
        return st.dictionaries(st.text(TEXT, max_size=8), JSON_VALUES, max_size=LIST_LIMIT)
    return _scalar(kind, metadata)


def _scalar(kind: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return model(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if kind is bool:
        return st.booleans()
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind is int:
        return _integers(metadata)
    if kind is str:
        pattern = next((item.pattern for item in metadata if hasattr(item, "pattern")), None)
        if pattern:
            return st.from_regex(pattern.replace("$", r"\Z"), fullmatch=True)
        longest = next((item.max_length for item in metadata if isinstance(item, at.MaxLen)), None)
        assert longest, "every string on the wire has a bound"
        return st.text(TEXT, max_size=min(longest, 40))
    raise AssertionError(f"no strategy for {kind}")


def _integers(metadata: list[Any]) -> st.SearchStrategy[int]:
    low = high = None
    for item in metadata:
        low = item.ge if isinstance(item, at.Ge) else low
        high = item.le if isinstance(item, at.Le) else item.lt - 1 if isinstance(item, at.Lt) else high
    assert low is not None, "every integer on the wire has a lower bound"
    assert high is not None, "every integer on the wire has an upper bound"
    return st.integers(low, high)


CONTROLS: st.SearchStrategy[Any] = st.one_of(*map(model, CONTROL))
RANK_JSON: st.SearchStrategy[Any] = st.one_of(*map(model, ranks.JSON))

_u16, _u32 = st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 32) - 1)
_u63 = st.integers(0, (1 << 63) - 1)
_seq = st.integers(1, (1 << 63) - 1)
_size = st.integers(0, limits.TENSOR_BYTES)
_number = st.integers(1, limits.MAIL_NUMBER - 1)
_dtype = st.sampled_from(["float32", "bool", "float8_e4m3fnuz", "x" * limits.DTYPE_CHARS])
_inline = st.binary(max_size=300) | st.just(bytes(limits.INLINE_BYTES))


@st.composite
def chunks(draw: st.DrawFn) -> tuple[ChunkHeader, bytes]:
    """Return a valid chunk header with a payload of the size it says."""
    payload = draw(st.binary(max_size=200))
    header = ChunkHeader(
        gid=GroupId(draw(st.binary(min_size=16, max_size=16))),
        seq=draw(_u63),
        role=draw(st.sampled_from(Role)),
        part=draw(_u16),
        index=draw(_u32),
        size=len(payload),
        digest=Digest(draw(st.binary(min_size=32, max_size=32))),
        descriptor=draw(st.binary(min_size=8, max_size=8)),
        done=draw(_u63),
    )
    return header, payload


@st.composite
def posts(draw: st.DrawFn) -> ranks.Post:
    """Return a valid Post: inline, without data, or in the arena."""
    handle, seq, descriptor = draw(_u32), draw(_seq), draw(st.binary(max_size=1024))
    flags = draw(st.sampled_from([0, ranks.INLINE, ranks.NODATA]))
    seg, off = draw(_u16), draw(_u63)
    if flags == ranks.INLINE:
        payload = draw(_inline)
        return ranks.Post(handle, seq, flags, seg, off, len(payload), len(payload), descriptor, payload)
    nbytes = draw(_size)
    return ranks.Post(handle, seq, flags, seg, off, nbytes, draw(st.integers(0, nbytes)), descriptor)


@st.composite
def results(draw: st.DrawFn) -> ranks.Result:
    """Return a valid Result: inline, without data, partly or fully in the arena."""
    handle, seq, seg, off = draw(_u32), draw(_seq), draw(_u16), draw(_u63)
    flags = draw(st.sampled_from([0, ranks.FINAL, ranks.FINAL | ranks.INLINE, ranks.FINAL | ranks.NODATA]))
    if flags & ranks.INLINE:
        payload = draw(_inline)
        return ranks.Result(handle, seq, flags, seg, off, len(payload), len(payload), payload)
    total = draw(_size)
    ready = total if flags == ranks.FINAL else draw(st.integers(0, total))
    return ranks.Result(handle, seq, flags, seg, off, ready, total)


@st.composite
def mails(draw: st.DrawFn) -> ranks.Mail | ranks.MailBytes | ranks.Arrived:
    """Return a valid Mail, MailBytes or Arrived: inline, or in the arena."""
    handle, n, seg, off, rank = draw(_u32), draw(_number), draw(_u16), draw(_u63), draw(st.integers(0, 65534))
    payload = draw(_inline)
    size, inline = draw(_size), draw(st.booleans())
    size, payload = (len(payload), payload) if inline else (size, b"")
    kind = draw(st.sampled_from([ranks.Mail, ranks.MailBytes, ranks.Arrived]))
    if kind is ranks.Mail:
        return ranks.Mail(handle, n, int(inline), rank, draw(_u32), size, draw(_dtype), payload)
    if kind is ranks.MailBytes:
        return ranks.MailBytes(handle, n, int(inline), rank, seg, off, size, payload)
    final = inline or draw(st.booleans())
    flags = (ranks.INLINE if inline else 0) | (ranks.FINAL if final else 0)
    ready = size if final else draw(st.integers(0, size))
    return ranks.Arrived(handle, n, flags, rank, seg, off, ready, size, payload)


BINARIES: st.SearchStrategy[Any] = st.one_of(
    posts(),
    results(),
    st.builds(ranks.Lease, _u32, _size),
    st.builds(ranks.Leased, _u32, _u16, _u63, _size),
    st.builds(ranks.Unlease, _u16, _u63),
    st.builds(ranks.Ready, _u32, _seq, _size),
    st.builds(ranks.Consumed, _u32, _seq),
    st.builds(ranks.Explain, _u32, _seq),
    st.builds(ranks.Freed, _u32, _seq),
    mails(),
    st.builds(ranks.Receive, _u32, _number, _u16, _u32, _size, _dtype),
    st.builds(ranks.MailTaken, _u32, _number),
    st.builds(ranks.MailRead, _u32, _number),
    st.builds(ranks.MailAsked, _u32, _number, _u16),
    st.builds(ranks.MailDone, _u32, _number, _u16),
    st.builds(ranks.Got, _u32, _seq, st.binary(min_size=32, max_size=32)),
    st.builds(ranks.Verified, _u32, _seq),
)
