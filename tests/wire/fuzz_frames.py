"""Fuzz the decoders: ``python tests/wire/fuzz_frames.py --seconds 60 [--seed N]``.

The oracle is one sentence: whatever bytes come in, there is a message or a ``WireError``, and a message
that was decoded survives being encoded and decoded again. With atheris installed the search is guided by
coverage; otherwise the golden vectors are mutated at random from a seed that is printed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if "--corpus" in sys.argv:
        import atheris

        with atheris.instrument_imports(include=["frogzmq"]):
            importlib.import_module("frogzmq.wire.ranks")

from support.wire_samples import VECTORS, encode_datagrams

from frogzmq.errors import WireError
from frogzmq.wire import frames, ranks

LOCAL, PEER, SPLIT = 0, 1, 2
"""First byte of an input: datagram, one frame, or two frames (then two bytes say where frame 1 ends)."""
TOKENS = (
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"[[[[",
    b"{}",
    b'"\\ud800"',
    b"9" * 400,
    b"\xff" * 8,
    b"FZ\x01\x20",
)


def check(data: bytes) -> bool:
    """Decode one input; True where it was a message. Any exception but ``WireError`` is a finding."""
    if not data:
        return False
    mode, body = data[0] % 3, data[1:]
    try:
        if mode == LOCAL:
            return _check_datagram(body)
        cut = int.from_bytes(body[:2], "little") if mode == SPLIT else 0
        parts = [body[2 : 2 + cut], body[2 + cut :]] if mode == SPLIT else [body]
        message = frames.decode(parts)
    except WireError:
        return False
    if isinstance(message, frames.ChunkFrame):
        assert frames.encode_chunk(message.header) == parts[0]
        assert message.payload == parts[1]
    else:
        assert frames.decode([frames.encode(message)]) == message
    return True


def _check_datagram(body: bytes) -> bool:
    message = ranks.decode(body)
    again = encode_datagrams(message)
    if isinstance(message, tuple):
        assert again == [body]
        assert ranks.Assembler().feed(body) == message
    return True


def corpus() -> list[bytes]:
    """Return the golden vectors as fuzz inputs."""
    found = []
    for path in sorted(VECTORS.glob("*.bin")):
        data = path.read_bytes()
        if path.name == "peer-chunk.bin":
            found.append(bytes([SPLIT]) + frames.CHUNK_HEADER_BYTES.to_bytes(2, "little") + data)
        else:
            found.append(bytes([PEER if path.name.startswith("peer-") else LOCAL]) + data)
    return found


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return ``data`` with one to four random edits behind its first byte."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(1, len(changed))
        match rng.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del changed[at : at + rng.randint(1, 16)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
            case 4:
                changed[at:at] = rng.choice(TOKENS)
            case _:
                end = at + rng.randint(1, 32)
                changed[at:at] = changed[at:end]
    return bytes(changed)


def run(seconds: float, seed: int) -> tuple[int, int]:
    """Mutate for so long; return inputs tried and how many were messages."""
    rng, seeds = random.Random(seed), corpus()
    tried = accepted = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(200):
            data = mutate(rng.choice(seeds), rng)
            try:
                accepted += check(data)
            except Exception:
                print(f"seed {seed}, input {tried}: {data!r}", file=sys.stderr)
                raise
            tried += 1
    return tried, accepted


def run_atheris(corpus_dir: str, seconds: float, seed: int) -> None:
    """Hand over to libFuzzer, which ends the process."""
    import atheris

    options = [sys.argv[0], f"-max_total_time={max(1, int(seconds))}", f"-seed={seed}", "-max_len=4096"]
    atheris.Setup([*options, corpus_dir], lambda data: check(data) and None)
    atheris.Fuzz()


def guided(seconds: float, seed: int) -> int:
    """Run this file under atheris with the golden vectors as its first inputs; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="frogzmq-fuzz-") as directory:
        for number, data in enumerate(corpus()):
            (Path(directory) / str(number)).write_bytes(data)
        again = [sys.executable, __file__, "--seconds", str(seconds), "--seed", str(seed)]
        return subprocess.run([*again, "--corpus", directory], check=False).returncode


def main() -> None:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(description="Fuzz the wire decoders.")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--corpus", help="directory of inputs, for the process that runs under atheris")
    options = parser.parse_args()
    if options.corpus:
        run_atheris(options.corpus, options.seconds, options.seed)
    elif importlib.util.find_spec("atheris"):
        sys.exit(guided(options.seconds, options.seed))
    tried, accepted = run(options.seconds, options.seed)
    print(f"seed {options.seed}: {tried} inputs, {accepted} of them messages, no finding")


if __name__ == "__main__":
    main()
