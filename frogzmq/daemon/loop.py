"""The poll loop: one thread, one epoll, everything that a peer waits for.

ZeroMQ's own poller asks every socket about its state on every call (4 us each here); this loop watches
their descriptors beside the local ranks' and asks only those that were reported or used.
"""

from __future__ import annotations

import logging
import math
import os
import select
from collections.abc import Callable

from frogzmq.daemon.driver import Driver
from frogzmq.daemon.memory import give_back
from frogzmq.machine import Tick

log = logging.getLogger("frogzmq.peer")

EPHEMERAL_GRACE_S = 1.0
"""An ephemeral peer ends this long after its last rank has gone."""
EPHEMERAL_FIRST_S = 10.0
"""... or this long after its start, if no rank ever came."""
REST_AFTER_S = 5.0
"""A peer without groups gives memory that it kept for the next op back after this long."""
FLUSH_S = 0.5
"""How long a stopping peer tries to get its last words out."""


class Loop:
    """Runs a ``Driver`` until ``stop``. ``why`` is the reason, ``failed`` whether it is an error."""

    def __init__(
        self, driver: Driver, epoll: select.epoll, clock: Callable[[], float], *, ephemeral: bool
    ) -> None:
        self.driver, self.clock = driver, clock
        self.why = ""
        self.failed = False
        self._epoll = epoll
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        epoll.register(self._wake, select.EPOLLIN)
        epoll.register(driver.workers.fd, select.EPOLLIN)
        self._end_at = clock() + EPHEMERAL_FIRST_S if ephemeral else math.inf
        self._ephemeral, self._ranks_seen = ephemeral, 0
        self._worked, self._rest_at = False, math.inf

    def stop(self, why: str, *, failed: bool = False) -> None:
        """End soon; safe in signal handlers and other threads."""
        if not self.why:
            self.why, self.failed = why, failed
            os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Serve until stopped. Exceptions of our own bugs leave this method."""
        driver, clock = self.driver, self.clock
        core, fabric = driver.core, driver.fabric
        more = fabric.drain()
        while not self.why:
            deadline = min(core.deadline, self._end_at, self._rest_at)
            if more:
                timeout = 0.0
            elif deadline == math.inf:
                timeout = -1.0
            else:
                timeout = max(0.0, deadline - clock())
            self._serve(timeout)
            more = fabric.drain()
            now = clock()
            if now >= deadline:  # one that came nearer meanwhile is met in the next round
                driver.feed(Tick())
                more = fabric.drain() or more
            if core.peers.fatal:
                self.stop(core.peers.fatal, failed=True)
            if self._ephemeral:
                self._watch_end(now)
            if core.busy:
                self._worked, self._rest_at = True, math.inf
            elif self._worked:
                self._rest(now)

    def _serve(self, timeout: float) -> None:
        driver = self.driver
        service, fabric = driver.service, driver.fabric
        for fd, mask in self._epoll.poll(timeout):
            if service.ready(fd, mask) or fabric.touch(fd):
                continue
            if fd == driver.workers.fd:
                driver.work_done()
            elif fd == service.fd:
                service.accept()
            elif fd == self._wake:
                os.eventfd_read(fd)

    def _rest(self, now: float) -> None:
        """Nothing lives here any more: soon give back what was kept for reuse."""
        if self._rest_at == math.inf:
            self._rest_at = now + REST_AFTER_S
        elif now >= self._rest_at:
            self._worked, self._rest_at = False, math.inf
            self.driver.service.arena.trim()
            give_back()

    def _watch_end(self, now: float) -> None:
        service = self.driver.service
        if service.living:
            self._end_at = math.inf
        elif service.ever and (self._end_at == math.inf or service.ever != self._ranks_seen):
            self._end_at = now + EPHEMERAL_GRACE_S
        elif now >= self._end_at:
            if service.ever and self.driver.core.busy:
                self._end_at = now + EPHEMERAL_GRACE_S  # other machines may still ask for bytes
            else:
                self.stop("no rank is left" if service.ever else "no rank ever came")
        self._ranks_seen = service.ever

    def flush(self) -> None:
        """Let last words leave, for a bounded time."""
        until = self.clock() + FLUSH_S
        service = self.driver.service
        while any(conn.waiting for conn in service.conns.values()) and self.clock() < until:
            for fd, mask in self._epoll.poll(0.05):
                conn = service.conns.get(fd)
                if conn is not None and mask & select.EPOLLOUT:
                    conn.flush()

    def close(self) -> None:
        """Release the loop's own descriptor."""
        os.close(self._wake)
