"""Make a group when torch asks for one, and share one client among all groups of the process."""

from __future__ import annotations

import inspect
import os
import threading
import time
from typing import Any

from frogzmq.backend.errors import surface
from frogzmq.backend.process_group import FrogProcessGroup
from frogzmq.backend.register import NAME
from frogzmq.backend.rendezvous import meet
from frogzmq.backend.standin import standing_in
from frogzmq.backend.work import completer
from frogzmq.client import Client
from frogzmq.client.options import options_from
from frogzmq.config import environment, warn_unknown_variables
from frogzmq.errors import ConfigError, FrogError
from frogzmq.wire.messages import Identity, JoinGroup

_lock = threading.Lock()


def create_group(options: Any, pg_options: object, asked_as: str = NAME) -> FrogProcessGroup:
    """Build the group for torch's ``_DistributedBackendOptions``; raises errors of the torch surface.

    ``asked_as``: the name that it stands behind; peek and errors show it with the group's name.
    """
    try:
        return _create(options, pg_options, asked_as)
    except FrogError as error:
        raise surface(error) from None


def _create(options: Any, pg_options: object, asked_as: str) -> FrogProcessGroup:
    _refuse_mixed()
    warn_unknown_variables()
    settings = options_from(pg_options).resolve()
    timeout_s = options.timeout.total_seconds()
    deadline = time.monotonic() + timeout_s
    name = options.group_id or "default"
    shown = name if asked_as == NAME else f"{name} as {asked_as}"
    shared = _acquire()
    try:
        who = _facing_master(shared.client.welcome.who)
        met = meet(
            options.store,
            name,
            options.group_rank,
            options.group_size,
            who,
            timeout_s,
            options.global_ranks_in_group or (),
        )
        job = environment().get("TORCHELASTIC_RUN_ID", "")
        handle = shared.client.join(
            JoinGroup(
                gid=met.gid,
                job=job[:256],
                name=shown[:256],
                rank=options.group_rank,
                size=options.group_size,
                timeout_s=max(1.0, deadline - time.monotonic()),
                options=settings,
                members=met.members,
            )
        )
    except BaseException:
        shared.release()
        raise
    handle.timeout_s = timeout_s
    return FrogProcessGroup(handle, options.store, name, shared.release)


def _facing_master(who: Identity) -> Identity:
    """Put the address by which this machine reaches the job's master first: others likely come that way."""
    master = environment().get("MASTER_ADDR", "")
    if not master or len(who.endpoints) < 2:
        return who
    from frogzmq.addresses import candidate_addresses

    order = candidate_addresses(master)
    pubs = dict(zip(who.endpoints, who.pub_endpoints, strict=False))

    def place(endpoint: str) -> int:
        host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        return order.index(host) if host in order else len(order)

    endpoints = sorted(who.endpoints, key=place)
    rest = who.pub_endpoints[len(who.endpoints) :]
    pub_endpoints = [*(pubs[e] for e in endpoints if e in pubs), *rest]
    return who.model_copy(update={"endpoints": endpoints, "pub_endpoints": pub_endpoints})


def seen_by_torch(name: str) -> Any:
    """A variable of the torch function that makes the group, which torch does not hand to creators."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None else None


def _refuse_mixed() -> None:
    """Refuse ``cpu:frogzmq,cuda:nccl``: torch would drop the other entry without a word."""
    config = seen_by_torch("backend_config")
    devices = getattr(config, "device_backend_map", None)
    if not isinstance(devices, dict):
        return
    ours = (NAME, "gloo") if standing_in() else (NAME,)
    others = {device: other for device, other in devices.items() if other not in ours}
    if others:
        listed = ",".join(f"{device}:{backend}" for device, backend in devices.items())
        raise ConfigError(
            f"backend {listed!r}: {NAME} cannot share a group with other backends; use {NAME!r} for all "
            "devices, and new_group(backend=...) for a group of another backend"
        )


class SharedClient:
    """One client and the number of groups that use it; guarded by ``_lock``."""

    def __init__(self) -> None:
        self.client = Client()
        self.users = 0

    def release(self) -> None:
        """One group less; after the last the peer may end, and no thread of ours is left."""
        global _shared
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            if _shared is self:
                _shared = None
        self.client.close(True, "destroyed")
        completer.stop()


_shared: SharedClient | None = None


def _acquire() -> SharedClient:
    """The process's client, made at first use, after a fork, and after a lost peer."""
    global _shared
    with _lock:
        if _shared is None or _shared.client.forked or _shared.client.connection.lost is not None:
            _shared = SharedClient()
        _shared.users += 1
        return _shared


def _after_fork() -> None:
    # A lock that another thread held at the fork would never be released in the child.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
