"""Whatever bytes come in: a message or a ``WireError``, never another exception."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support import wire_strategies as ws
from support.wire_samples import encode_datagrams

from frogzmq.errors import WireError
from frogzmq.wire import frames, ranks
from frogzmq.wire.messages import PROTOCOL, ChunkHeader, Message

FUZZ = Path(__file__).with_name("fuzz_frames.py")
_spec = importlib.util.spec_from_file_location("fuzz_frames", FUZZ)
assert _spec is not None and _spec.loader is not None  # noqa: PT018
fuzz = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz)

heads = st.integers(0, 40).map(lambda kind: b"FZ" + bytes((PROTOCOL, kind)))
edits = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "truncate"]), st.integers(0), st.integers(1, 255))
)


def edited(data: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    changed = bytearray(data)
    for what, where, value in changes[:4]:
        at = where % (len(changed) + 1)
        if what == "flip" and at < len(changed):
            changed[at] ^= value
        elif what == "cut":
            del changed[at : at + value]
        elif what == "insert":
            changed[at:at] = bytes([value])
        elif what == "truncate":
            del changed[at:]
    return bytes(changed)


def take_frames(parts: list[bytes]) -> None:
    try:
        message = frames.decode(parts)
    except WireError:
        return
    if isinstance(message, frames.ChunkFrame):
        assert [frames.encode_chunk(message.header), message.payload] == parts
    else:
        assert frames.decode([frames.encode(message)]) == message


def take_datagram(datagram: bytes) -> None:
    try:
        message = ranks.decode(datagram)
    except WireError:
        return
    if isinstance(message, tuple):
        assert encode_datagrams(message) == [datagram], "one message, one form"


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames(parts: list[bytes]) -> None:
    take_frames(parts)


@given(heads, st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_random_bodies_behind_a_valid_head(head: bytes, parts: list[bytes]) -> None:
    take_frames([head + parts[0], *parts[1:]])


@given(heads, ws.JSON_VALUES)
def test_any_json_behind_a_valid_head(head: bytes, value: object) -> None:
    import json

    take_frames([head + json.dumps(value).encode()])


@given(ws.CONTROLS, edits)
def test_mutated_control_messages(message: Message, changes: list[tuple[str, int, int]]) -> None:
    take_frames([edited(frames.encode(message), changes)])


@given(ws.chunks(), edits, edits)
def test_mutated_chunks(
    chunk: tuple[ChunkHeader, bytes], first: list[tuple[str, int, int]], second: list[tuple[str, int, int]]
) -> None:
    take_frames([edited(frames.encode_chunk(chunk[0]), first), edited(chunk[1], second)])


@given(st.integers(0, 80), st.binary(max_size=200))
def test_random_datagrams(kind: int, rest: bytes) -> None:
    take_datagram(bytes([kind]) + rest)
    take_datagram(rest)


@given(ws.BINARIES | ws.RANK_JSON, edits)
def test_mutated_datagrams(message: ranks.Datagram, changes: list[tuple[str, int, int]]) -> None:
    take_datagram(edited(encode_datagrams(message)[0], changes))


@given(
    st.lists(st.tuples(st.sampled_from([0, 3, 4, 10, 65, 71, 71, 200]), st.binary(max_size=20)), max_size=12)
)
def test_any_sequence_into_an_assembler(stream: list[tuple[int, bytes]]) -> None:
    assembler = ranks.Assembler()
    for kind, rest in stream:
        try:
            assembler.feed(bytes([kind]) + rest)
        except WireError:
            continue
    try:
        assembler.feed(b"\x00")  # an error drops what is held, so the next message is read as such
    except WireError:
        pass
    assert assembler.feed(ranks.encode_json(ranks.Peek())[0]) == ranks.Peek()


def test_the_fuzz_corpus_is_made_of_messages() -> None:
    seeds = fuzz.corpus()
    assert len(seeds) >= 39
    assert all(fuzz.check(data) for data in seeds)


def test_mutants_are_neither_all_messages_nor_all_refused() -> None:
    rng, seeds = random.Random(7), fuzz.corpus()
    accepted = sum(fuzz.check(fuzz.mutate(rng.choice(seeds), rng)) for _ in range(5000))
    assert 100 < accepted < 4900


def test_the_fuzz_target_runs_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, str(FUZZ), "--seconds", "1", "--seed", "1"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if importlib.util.find_spec("atheris") is None:
        found = re.search(r"(\d+) inputs, (\d+) of them messages, no finding", done.stdout)
        assert found is not None, done.stdout
        assert int(found[1]) >= 200
