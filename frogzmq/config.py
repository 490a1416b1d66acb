"""Settings of a peer and of a group. The only module that reads the environment.

A setting is wrong in one way only: ``ConfigError``, whose text names where it was written (a file and its
key, or a variable), what was found, what is allowed, and the nearest known name where one is unknown.

Functions take ``env`` for tests; left out, it is the process's environment.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import stat
import tempfile
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from frogzmq.errors import ConfigError
from frogzmq.types import Mode, Order
from frogzmq.wire.messages import GroupOptions

VARIABLES: dict[str, str] = {
    "FROGZMQ_MODE": "who folds: auto, shard or faithful",
    "FROGZMQ_ORDER": "the order in which contributions are folded: machine, rank or gloo",
    "FROGZMQ_RECEIPTS": "1: keep a receipt of every operation",
    "FROGZMQ_VERIFY": "1: compare the receipts of every operation before its ranks go on",
    "FROGZMQ_RUNTIME_DIR": "folder of the peer's socket and state; two folders make two machines",
    "FROGZMQ_AUTOLOAD": "0: `import torch` does not load frogzmq; a script must import it",
    "FROGZMQ_AS_GLOO": "1: stand behind the name gloo, for scripts that have it hard-wired",
    "FROGZMQ_CONFIG": "TOML file with the peer's settings",
    "FROGZMQ_LOG_LEVEL": "what the peer writes to stderr: debug, info, warning or error",
}
"""Every environment variable that frogzmq knows, with what it sets."""

SOCKET_NAME = "peer.sock"
MAX_SOCKET_PATH = 107
"""Bytes that fit into ``sockaddr_un.sun_path`` on Linux, without the closing zero."""

_TEMPORARY = "temporary folder"

LogLevel = Literal["debug", "info", "warning", "error"]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SEED = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\*")


def _as_bytes(value: object) -> object:
    """Turn ``"2GiB"`` into a number of bytes; numbers pass."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError("a number of bytes, or one with a unit such as '512MiB' or '2GiB'")
    return int(float(match[1]) * units[match[2].lower()])


def _as_host(value: object) -> object:
    """Refuse what cannot be an address to bind or advertise; pydantic says the rest."""
    if isinstance(value, str) and not _HOST.fullmatch(value):
        try:
            ipaddress.IPv6Address(value.strip("[]"))
        except ValueError:
            text = "an IP address or host name without a port, such as '0.0.0.0' or '192.168.1.7'"
            raise ValueError(text) from None
    return value


def _as_seed(value: object) -> object:
    """Refuse what is not ``tcp://host:port``."""
    match = _SEED.fullmatch(value) if isinstance(value, str) else None
    if match is None or not 0 < int(match[1]) < 1 << 16:
        raise ValueError("the address of another peer, such as 'tcp://192.168.1.7:29650'")
    return value


Size = Annotated[int, BeforeValidator(_as_bytes)]
Address = Annotated[str, BeforeValidator(_as_host)]
Seed = Annotated[str, BeforeValidator(_as_seed)]
Port = Annotated[int, Field(ge=0, lt=1 << 16)]


class PeerConfig(BaseModel):
    """What one machine's peer is told; every value has a default that works on a plain LAN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=64)] = ""
    """For people, in errors and views; empty: the machine's host name."""
    bind: Address = "0.0.0.0"
    """Address on which the peer listens; ``127.0.0.1`` keeps it to this machine."""
    port: Port = 0
    """TCP port for control and chunks; 0: any free one (fix it where a firewall needs to know)."""
    pub_port: Port = 0
    """TCP port for announcements; 0: any free one."""
    advertise: list[Address] = []
    """Addresses at which other machines reach this one, best first; empty: those of its interfaces."""
    peers: list[Seed] = []
    """Peers to dial at the start; those of a job are learnt from the job."""
    secrecy: Literal["full", "off"] = "full"
    """``full``: every byte between machines is encrypted and authenticated. ``off``: a trusted network."""
    lanes: Annotated[int, Field(ge=1, le=32)] = 2
    """Connections per pair of machines for chunks; more help on lossy and on long fat paths."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads that hash and fold; 0: one per core, at most eight."""
    arena_bytes: Annotated[Size, Field(ge=1 << 20, le=1 << 48)] = 1 << 33
    """Most memory that tensors in flight may take (a bound, not a reservation), as 8589934592 or '8GiB'."""
    arena_dir: str = ""
    """Folder of the arena; empty: /dev/shm where it has room, else the temporary folder."""
    log_level: LogLevel = "info"
    """Least severe line that the peer writes to stderr."""


def environment(env: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """``env``, or this process's environment."""
    return os.environ if env is None else env


def as_gloo_from_environment(env: Mapping[str, str] | None = None) -> bool | None:
    """What FROGZMQ_AS_GLOO asks for; None where it is not set."""
    env = environment(env)
    return _switch("as_gloo", None, env) if env.get("FROGZMQ_AS_GLOO") else None


def load_config(path: Path | None = None, env: Mapping[str, str] | None = None) -> PeerConfig:
    """Read the peer's settings from ``path``, else from the file in FROGZMQ_CONFIG, else the defaults."""
    env = environment(env)
    if path is None and env.get("FROGZMQ_CONFIG"):
        path = Path(env["FROGZMQ_CONFIG"])
    values = _read_toml(path) if path is not None else {}
    where = str(path)
    known = PeerConfig.model_fields
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key {key!r}{_nearest(key, known)}; known: {', '.join(known)}"
            )
    if env.get("FROGZMQ_LOG_LEVEL"):
        values["log_level"] = _choice("FROGZMQ_LOG_LEVEL", env["FROGZMQ_LOG_LEVEL"], get_args(LogLevel))
    try:
        return PeerConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(where, detail) for detail in error.errors())) from None


def group_options(
    env: Mapping[str, str] | None = None,
    mode: str | None = None,
    order: str | None = None,
    receipts: bool | None = None,
    verify: bool | None = None,
) -> GroupOptions:
    """What a group is made with: arguments first, then the variables of these names, then the defaults."""
    env = environment(env)
    chosen_mode = _setting("mode", mode, env, Mode, Mode.AUTO)
    chosen_order = _setting("order", order, env, Order, Order.MACHINE)
    return GroupOptions(
        mode=Mode(chosen_mode),
        order=Order(chosen_order),
        receipts=_switch("receipts", receipts, env),
        verify=_switch("verify", verify, env),
    )


def runtime_dir(env: Mapping[str, str] | None = None, explicit: Path | None = None) -> Path:
    """The folder of this machine's peer, made for this user alone (mode 0700) where it is missing.

    FROGZMQ_RUNTIME_DIR, else ``$XDG_RUNTIME_DIR/frogzmq``, else a private one in the temporary folder.
    ``ConfigError`` where others could reach into it, or the path is too long for a unix socket.
    """
    path, where = locate_runtime_dir(env, explicit)
    longest = len(os.fsencode(path / SOCKET_NAME))
    if longest > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{where}: the socket's path {path / SOCKET_NAME} has {longest} bytes, a unix socket allows "
            f"{MAX_SOCKET_PATH}; set FROGZMQ_RUNTIME_DIR to a shorter folder"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # In a folder that all may write to, a link of somebody else's could point anywhere.
        info = path.lstat() if where == _TEMPORARY else path.stat()
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot make the folder {path}: {error.strerror}; set FROGZMQ_RUNTIME_DIR"
        ) from None
    _check_private(path, info, where)
    return path


def locate_runtime_dir(
    env: Mapping[str, str] | None = None, explicit: Path | None = None
) -> tuple[Path, str]:
    """Where the folder of the peer is and which setting says so; touches nothing."""
    env = environment(env)
    if explicit is not None:
        return explicit.absolute(), "runtime dir"
    if env.get("FROGZMQ_RUNTIME_DIR"):
        return Path(env["FROGZMQ_RUNTIME_DIR"]).absolute(), "FROGZMQ_RUNTIME_DIR"
    base = env.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir() and os.access(base, os.W_OK):
        return Path(base).absolute() / "frogzmq", "XDG_RUNTIME_DIR"
    return Path(tempfile.gettempdir()).absolute() / f"frogzmq-{os.getuid()}", _TEMPORARY


def unknown_variables(env: Mapping[str, str] | None = None) -> list[str]:
    """One text per FROGZMQ_* variable that nothing reads, with the nearest known name."""
    return [
        f"unknown variable {name}{_nearest_variable(name)}; known: {', '.join(VARIABLES)}"
        for name in sorted(environment(env))
        if name.startswith("FROGZMQ_") and name not in VARIABLES
    ]


def warn_unknown_variables(env: Mapping[str, str] | None = None) -> None:
    """Warn once per process and name about FROGZMQ_* variables that nothing reads."""
    for text in unknown_variables(env):
        if text not in _warned:
            _warned.add(text)
            warnings.warn(f"frogzmq: {text}", stacklevel=2)


_warned: set[str] = set()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None


def _check_private(path: Path, info: os.stat_result, where: str) -> None:
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{where}: {path} is not a folder; set FROGZMQ_RUNTIME_DIR to one")
    if info.st_uid != os.getuid():
        raise ConfigError(
            f"{where}: {path} belongs to user {info.st_uid}, not to {os.getuid()}; "
            "set FROGZMQ_RUNTIME_DIR to a folder of your own"
        )
    if info.st_mode & 0o077:
        shared = info.st_mode & stat.S_ISVTX  # a temporary folder of everybody's
        raise ConfigError(
            f"{where}: {path} can be entered by others (mode {stat.S_IMODE(info.st_mode):04o}); "
            + (f"use one inside it: {path}/frogzmq" if shared else f"run: chmod 700 {path}")
        )


def _setting(
    name: str, given: str | None, env: Mapping[str, str], kind: type[Mode] | type[Order], default: str
) -> str:
    variable = f"FROGZMQ_{name.upper()}"
    where, value = (name, given) if given is not None else (variable, env.get(variable) or default)
    return _choice(where, str(value), [str(member) for member in kind])


_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= {"0": False, "false": False, "no": False, "off": False, "": False}


def _switch(name: str, given: bool | None, env: Mapping[str, str]) -> bool:
    if given is not None and not isinstance(given, bool):
        raise ConfigError(f"{name}: {given!r} is not allowed; it must be True or False")
    variable = f"FROGZMQ_{name.upper()}"
    value = env.get(variable, "").strip().lower()
    if given is None and value not in _SWITCH:
        raise ConfigError(f"{variable}: {value!r} is not known; allowed: 1 or 0")
    return _SWITCH[value] if given is None else given


def _choice(where: str, value: str, allowed: Iterable[str]) -> str:
    names = list(allowed)
    if value.lower() in names:
        return value.lower()
    raise ConfigError(f"{where}: {value!r} is not known{_nearest(value, names)}; allowed: {', '.join(names)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _nearest_variable(name: str) -> str:
    """Compare without the prefix, which every name has and which would make any two look alike."""
    known = [variable.removeprefix("FROGZMQ_") for variable in VARIABLES]
    close = difflib.get_close_matches(name.removeprefix("FROGZMQ_"), known, n=1, cutoff=0.5)
    return f" (did you mean FROGZMQ_{close[0]}?)" if close else ""


def _explain(where: str, detail: ErrorDetails) -> str:
    """One sentence out of one pydantic complaint: file, key, value, what is allowed."""
    key = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    message = re.sub(r"^Input should be ", "", message)
    return f"{where}: {key} = {detail['input']!r} is not allowed; it must be {message}"
