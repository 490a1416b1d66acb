"""This machine's key pair (CURVE), which is also its identity: the peer id is a hash of the public key.

The pair lies in ``keys/peer.key`` below the peer's runtime directory: two lines of Z85 text, readable by
its owner only. A file that others can read is refused, not repaired: the key may be known already.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from frogzmq.errors import ConfigError
from frogzmq.types import PeerId

KEY_FILE = Path("keys") / "peer.key"
_CONTEXT = "frogzmq 2026 v1 peer id"
_MAX_FILE_BYTES = 1024
_Z85 = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
_KEY_CHARACTERS = 40
_HEADER = "# frogzmq peer key: keep it secret; a copy on a second machine makes two peers of one identity"


class KeyPair(NamedTuple):
    """CURVE keys as Z85 text of 40 characters each."""

    public: str
    secret: str

    def __repr__(self) -> str:
        """Never the secret: it would end up in logs."""
        return f"KeyPair(public={self.public!r})"


def peer_id_of(public: str) -> PeerId:
    """The peer id that belongs to a public key: 16 hex characters of a domain-separated BLAKE3."""
    return PeerId(blake3(public.encode(), derive_key_context=_CONTEXT).hexdigest()[:16])


def is_key(text: str) -> bool:
    """Whether ``text`` has the form of a key: 40 characters of Z85."""
    return len(text) == _KEY_CHARACTERS and _Z85.issuperset(text)


def load_or_create(directory: Path) -> KeyPair:
    """Read the key pair below ``directory``, or put one there (atomically: two starters get one pair).

    ``ConfigError``: the file is malformed, is not ours, or can be read by others, or the directory can.
    """
    path = directory / KEY_FILE
    if not path.exists():
        _create(path)
    return load(path)


def load(path: Path) -> KeyPair:
    """Read a key file; ``ConfigError`` says what is wrong with it and what to do."""
    _check_private(path.parent, "directory", 0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this machine's key: {error.strerror}") from None
    with open(fd, encoding="ascii", errors="replace") as file:
        _check_private(path, "file", 0o600, os.fstat(fd))
        lines = [line.strip() for line in file.read(_MAX_FILE_BYTES).splitlines()]
    keys = [line for line in lines if line and not line.startswith("# ")]
    if len(keys) != 2 or not all(is_key(key) for key in keys):
        raise ConfigError(
            f"{path}: not a key file (two lines of 40 characters, public and secret); "
            "remove it to get a new key, and with it a new identity"
        )
    return KeyPair(*keys)


def _create(path: Path) -> None:
    import zmq  # only where a pair is made: whoever reads one does without

    if not zmq.has("curve"):
        raise ConfigError("this libzmq has no CURVE, so it cannot encrypt: install pyzmq's own wheel")
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_private(path.parent, "directory", 0o700)
        public, secret = (key.decode() for key in zmq.curve_keypair())
        fd, aside = tempfile.mkstemp(dir=path.parent, prefix=".peer.key.")  # mode 0600
        try:
            with open(fd, "w", encoding="ascii") as file:
                file.write(f"{_HEADER}\n{public}\n{secret}\n")
                file.flush()
                os.fsync(fd)
            _link(aside, path)
        finally:
            os.unlink(aside)
    except OSError as error:
        raise ConfigError(f"{path}: cannot make this machine's key: {error.strerror}") from None


def _link(aside: str, path: Path) -> None:
    try:
        os.link(aside, path)  # unlike a rename, never replaces the key of who was faster
    except FileExistsError:
        return


def _check_private(path: Path, kind: str, mode: int, status: os.stat_result | None = None) -> None:
    try:
        status = path.stat() if status is None else status
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this machine's key: {error.strerror}") from None
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path}: this {kind} belongs to user {status.st_uid}, not to us ({os.geteuid()})")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path}: others can get at this {kind} (mode {stat.S_IMODE(status.st_mode):o}), so they may "
            f"know the key; remove the key to get a new one, or chmod {mode:o} if you are sure"
        )
