"""Puts a peer together from its configuration, and takes it apart again."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import random
import secrets
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

from frogzmq import __version__
from frogzmq.addresses import candidate_addresses, is_dialable, netns_id, tcp_endpoint
from frogzmq.config import SOCKET_NAME, PeerConfig
from frogzmq.daemon.driver import Driver
from frogzmq.daemon.fabric import Fabric
from frogzmq.daemon.link import Caller
from frogzmq.daemon.listening import FabricSettings
from frogzmq.daemon.loop import Loop
from frogzmq.daemon.peek import receipts_snapshot, snapshot
from frogzmq.daemon.ranks import Hooks, RankService
from frogzmq.daemon.workers import Workers
from frogzmq.dataplane.plane import DataPlane
from frogzmq.keys import KeyPair, load_or_create, peer_id_of
from frogzmq.machine import Stats
from frogzmq.proto.peer import PeerCore
from frogzmq.proto.settings import CoreSettings
from frogzmq.store.arena import Arena
from frogzmq.wire.messages import Identity

log = logging.getLogger("frogzmq.peer")

MAX_WORKERS = 8
MAX_ADDRESSES = 16
_LINGER_MS = 300


class Peer:
    """All parts of a running peer. The constructor undoes what it did where it fails."""

    def __init__(self, config: PeerConfig, runtime: Path, *, ephemeral: bool = False) -> None:
        self._undo: list[Callable[[], object]] = []
        try:
            self._build(config, runtime, ephemeral)
        except BaseException:
            self.close()
            raise

    def _build(self, config: PeerConfig, runtime: Path, ephemeral: bool) -> None:
        clock = time.monotonic
        started_at = clock()
        keys = load_or_create(runtime)
        epoll = select.epoll()
        self._undo.append(epoll.close)
        stats = Stats()
        # Begins with the time of the start, so that of two instances the older one can be told.
        instance = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        caller = Caller(peer_id_of(keys.public), instance, keys.public.encode(), keys.secret.encode())
        fabric = Fabric(caller, _fabric_settings(config), stats, epoll)
        self._undo.append(lambda: fabric.close(_LINGER_MS))
        me = _identity(config, keys, caller, fabric)
        core = PeerCore(me, CoreSettings(), random.Random(instance))
        fabric.stats = core.stats
        arena = _arena(config, runtime)
        self._undo.append(arena.close)
        workers = Workers(config.workers or min(MAX_WORKERS, os.cpu_count() or 1))
        self._undo.append(workers.close)
        service = RankService(runtime / SOCKET_NAME, me, arena, core.stats, epoll, ephemeral=ephemeral)
        self._undo.append(service.close)
        plane = DataPlane(arena)
        self.driver = Driver(core, plane, fabric, service, workers, clock)
        self.loop = Loop(self.driver, epoll, clock, ephemeral=ephemeral)
        self._undo.append(self.loop.close)
        service.hooks = Hooks(
            feed=self.driver.feed,
            put_input=plane.put_input,
            explain=lambda gid, seq: core.explain(gid, seq, clock()),
            snapshot=lambda: snapshot(self.driver, started_at),
            receipts=lambda gid: receipts_snapshot(core, gid),
            stop=self.loop.stop,
        )
        fabric.sink, fabric.on_chunk = self.driver.feed, self.driver.on_chunk
        fabric.on_mismatch = self.driver.on_mismatch
        for endpoint in config.peers:
            self.driver.seed(endpoint)
        log.info(
            "peer %s (%s) ready: %s, local %s", me.name, me.peer, ", ".join(me.endpoints), me.local_endpoint
        )

    def run(self) -> None:
        """Serve until stopped, then say goodbye. Raises what was our own bug."""
        try:
            self.loop.run()
        except BaseException as error:
            self.loop.stop(f"internal error: {error!r}", failed=True)
            raise
        finally:
            self.driver.farewell(self.loop.why)
            self.loop.flush()

    def close(self) -> None:
        """Release everything, last thing first."""
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception:
                log.exception("while stopping")


def _fabric_settings(config: PeerConfig) -> FabricSettings:
    encrypted = config.secrecy == "full"
    return FabricSettings(config.bind, config.port, config.pub_port, encrypted, config.lanes)


def _identity(config: PeerConfig, keys: KeyPair, caller: Caller, fabric: Fabric) -> Identity:
    hosts = (config.advertise or _reachable(config.bind))[:MAX_ADDRESSES]
    return Identity(
        peer=caller.peer,
        instance=caller.instance,
        name=config.name or socket.gethostname(),
        endpoints=[tcp_endpoint(host, fabric.outer.port) for host in hosts],
        local_endpoint=tcp_endpoint("127.0.0.1", fabric.inner.port),
        pub_endpoints=[tcp_endpoint(host, fabric.pub_port) for host in hosts]
        + [tcp_endpoint("127.0.0.1", fabric.local_pub_port)],
        key=keys.public if config.secrecy == "full" else "",
        netns=netns_id(),
        python=platform.python_version(),
        version=__version__,
    )


def _reachable(bind: str) -> list[str]:
    """Where others can dial a listener on ``bind``, best first; nowhere for loopback."""
    if bind in ("0.0.0.0", "::", "[::]", "*"):
        return [host for host in candidate_addresses() if bind != "0.0.0.0" or ":" not in host]
    return [bind] if is_dialable(bind) else []


def _arena(config: PeerConfig, runtime: Path) -> Arena:
    """On /dev/shm under a name that belongs to the runtime directory; disk is the fallback."""
    name = f"frogzmq-{os.getuid()}-{hashlib.sha256(os.fsencode(runtime.resolve())).hexdigest()[:12]}"
    base = Path(config.arena_dir) if config.arena_dir else Path("/dev/shm")
    fallback = runtime / "arena"
    directory = base / name if base.is_dir() else fallback
    return Arena(directory, max_bytes=config.arena_bytes, fallback=fallback, warn=log.warning)
