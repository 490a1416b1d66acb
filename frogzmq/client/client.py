"""One process's connection to its machine's peer: greeting, groups, and who gets which message."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import frogzmq
from frogzmq.client import lifecycle
from frogzmq.client.connection import Connection
from frogzmq.client.group import GroupHandle
from frogzmq.client.launch import connect
from frogzmq.client.leases import Block, LeasePool
from frogzmq.client.letters import GivenBlocks, again
from frogzmq.client.ops import Reply
from frogzmq.config import runtime_dir as find_runtime_dir
from frogzmq.errors import DeadlineExceeded, FrogError, PeerUnreachable, from_code
from frogzmq.store.map import ArenaMap
from frogzmq.wire.limits import clip
from frogzmq.wire.mail import MAIL_SEQ
from frogzmq.wire.messages import PROTOCOL, JoinGroup
from frogzmq.wire.ranks import (
    Arrived,
    Bye,
    Datagram,
    Error,
    Explained,
    Failed,
    Freed,
    Hello,
    Join,
    Joined,
    Leased,
    Leave,
    MailAsked,
    MailDone,
    MailFailed,
    Note,
    Peek,
    Peeked,
    Result,
    Verified,
    Welcome,
    encode_explain,
)  # fmt: skip

logger = logging.getLogger("frogzmq")

GREETING_S = 10.0
"""How long the peer may take to answer HELLO: it is on this machine, so only a stopped one takes longer."""
HANGUP_S = 5.0
"""How long a peer that hangs up before its greeting is tried again: one that ends takes no longer."""
HANGUP_PAUSE_S = 0.05
JOIN_GRACE_S = 3.0
"""Time beyond the group's own in which the peer's account of what is missing may arrive."""


class Client:
    """Connects to the peer of ``runtime_dir`` (default: see ``frogzmq.config``), starting one if need be.

    Raises ``PeerUnreachable`` where there is none and none can be started, ``VersionMismatch`` where it
    speaks another protocol. In a forked child every call raises ``RuntimeError`` and touches nothing.
    """

    def __init__(self, runtime_dir: Path | str | None = None, env: Mapping[str, str] | None = None) -> None:
        self._pid = os.getpid()
        self._closed = False
        self.departed = False
        """BYE has been said: nothing else is sent, and no exit handler waits for the peer any more."""
        folder = find_runtime_dir(env, Path(runtime_dir) if runtime_dir is not None else None)
        self._lock = threading.Lock()
        self._groups: dict[int, GroupHandle] = {}
        self._held: dict[tuple[int, int], Block] = {}
        self._writing: dict[tuple[int, int], bool] = {}
        """Blocks that are being written, and whether the peer has freed them meanwhile."""
        self._writing_lock = threading.Lock()
        self._joins: dict[int, Reply] = {}
        self._explains: dict[tuple[int, int], list[Reply]] = {}
        self._peeks: deque[Reply] = deque()
        self._greeting = Reply()
        self._next_handle = 1
        self._handlers: dict[type, Callable[[Any], None]] = {
            Leased: self._on_leased, Freed: self._on_freed, Joined: self._on_joined, Failed: self._on_failed,
            Explained: self._on_explained, Note: self._on_note, Error: self._on_error,
            Verified: self._on_verified,
            Welcome: self._on_welcome, Peeked: self._on_peeked, Arrived: self._on_arrived,
            MailAsked: self._on_mail_asked, MailDone: self._on_mail_done, MailFailed: self._on_mail_failed,
        }  # fmt: skip
        again_until = time.monotonic() + HANGUP_S
        while not self._connected(folder, env, again_until):
            time.sleep(HANGUP_PAUSE_S)
        lifecycle.add(self, env)

    def _connected(self, folder: Path, env: Mapping[str, str] | None, again_until: float) -> bool:
        """Connect and greet; False to try again: the peer that was found was just about to end."""
        self.connection = Connection(connect(folder, env), self._dispatch, self._tick, self._on_lost)
        self.leases = LeasePool(self.connection.send)
        self.given = GivenBlocks(self.leases)
        try:
            self.welcome = self._greet(folder)
            self.arena = ArenaMap([Path(path) for path in self.welcome.arena])
        except BaseException as error:
            hung_up = self.connection.lost is error and isinstance(error, PeerUnreachable)
            self.connection.close(PeerUnreachable("the greeting failed"))
            if not hung_up or time.monotonic() >= again_until:
                raise
            self._greeting = Reply()
            return False
        return True

    def _greet(self, folder: Path) -> Welcome:
        torch = getattr(
            sys.modules.get("torch"), "__version__", "none"
        )  # empty is how a command line tool says that it is no rank
        python = ".".join(map(str, sys.version_info[:3]))
        self.connection.send_json(
            Hello(
                protocol=PROTOCOL, pid=self._pid, version=frogzmq.__version__, torch=str(torch), python=python
            )
        )
        if not self.connection.wait_for(self._greeting, time.monotonic() + GREETING_S):
            raise self.connection.lost or PeerUnreachable(
                f"this machine's peer ({folder}) does not answer; it may be stopped or overloaded"
            )
        if self._greeting.error is not None:
            raise self._greeting.error
        assert isinstance(self._greeting.value, Welcome)
        return self._greeting.value

    # ------------------------------------------------------------------- groups
    def join(self, request: JoinGroup) -> GroupHandle:
        """Take part in a group; return when all its ranks on all machines do.

        Raises what the peer says is wrong, or ``DeadlineExceeded`` after ``request.timeout_s``.
        """
        self.check_usable()
        with self._lock:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            group = self._groups[handle] = GroupHandle(self, handle, request)
            reply = self._joins[handle] = Reply()
        fields = {name: getattr(request, name) for name in JoinGroup.model_fields}
        try:
            self.connection.send_json(Join.model_construct(handle=handle, **fields))
            patience = time.monotonic() + request.timeout_s + JOIN_GRACE_S
            if not self.connection.wait_for(reply, patience):
                raise self.connection.lost or DeadlineExceeded(
                    f"group {request.name!r} was not complete after {request.timeout_s:g} s on rank "
                    f"{request.rank} (timeout); the peer did not say who is missing"
                )
            if reply.error is not None:
                raise again(reply.error)
        except BaseException as error:
            group.leave(False, lifecycle.reason_of(error))
            raise
        finally:
            self._joins.pop(handle, None)
        return group

    def leave(self, group: GroupHandle, clean: bool, reason: str) -> None:
        """Tell the peer that this rank is out of ``group`` (``GroupHandle.leave`` does the rest)."""
        self._groups.pop(group.handle, None)
        if self.connection.lost is None and not self.departed:
            try:
                self.connection.send_json(Leave(handle=group.handle, clean=clean, reason=clip(reason)))
            except FrogError:
                pass

    def groups(self) -> list[GroupHandle]:
        """The groups that this process is in."""
        return list(self._groups.values())

    def explain(self, group: GroupHandle, seq: int, timeout_s: float = 1.0) -> str:
        """Ask what op ``seq`` waits for; empty where no answer comes in time."""
        reply = Reply()
        with self._lock:
            self._explains.setdefault((group.handle, seq), []).append(reply)
        self.connection.send(encode_explain(group.handle, seq))
        self.connection.wait_for(reply, time.monotonic() + timeout_s)
        return str(reply.value or "")

    def peek(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The peer's snapshot of everything it does."""
        return self._ask(Peek(), timeout_s)

    def receipts(self, gid: str = "", timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The receipts that the peer keeps of one group (hex id) or of all, oldest first."""
        rows = self._ask(Peek(receipts=True, gid=gid), timeout_s)["receipts"]
        assert isinstance(rows, list)
        return rows

    def _ask(self, question: Peek, timeout_s: float) -> dict[str, Any]:
        self.check_usable()
        reply = Reply()
        with self._lock:
            self._peeks.append(reply)  # answers come in the order of the questions
            self.connection.send_json(question)
        if not self.connection.wait_for(reply, time.monotonic() + timeout_s):
            raise self.connection.lost or DeadlineExceeded(f"the peer gave no snapshot in {timeout_s:g} s")
        assert isinstance(reply.value, dict)
        return reply.value

    def hold(self, handle: int, seq: int, block: Block) -> None:
        """Keep ``block`` for op ``seq`` until the peer says FREED and ``written`` was called."""
        self._held[(handle, seq)] = block
        with self._writing_lock:
            self._writing[(handle, seq)] = False

    def written(self, handle: int, seq: int) -> None:
        """Nobody writes into the op's block any more."""
        with self._writing_lock:
            freed = self._writing.pop((handle, seq), False)
        block = self._held.pop((handle, seq), None) if freed else None
        if block is not None:
            self.leases.give_back(block)
            self._start_queued()

    # ------------------------------------------------------------------- ending
    @property
    def forked(self) -> bool:
        """Whether this is a forked copy of the process that made the client."""
        return lifecycle.process() != self._pid

    def check_usable(self) -> None:
        """Raise where this process must not, or cannot, use the connection."""
        if lifecycle.process() != self._pid:
            raise RuntimeError(
                f"frogzmq was set up in process {self._pid} and cannot be used after fork (this is process "
                f"{os.getpid()}); call init_process_group in the child itself, or start it with spawn"
            )
        if self.connection.lost is not None:
            raise again(self.connection.lost)

    def close(self, clean: bool = True, reason: str = "closed") -> None:
        """Say goodbye, stop the background thread and close the socket; idempotent."""
        if self.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        lifecycle.remove(self)
        self.goodbye(clean, reason)
        self.connection.close(PeerUnreachable(f"the connection to this machine's peer is closed: {reason}"))

    def abandon(self) -> None:
        """Drop the connection without a word, as a process that is killed does; idempotent."""
        if self.forked:
            return
        self.departed = True
        self.close(False, "abandoned")

    def goodbye(self, clean: bool, reason: str) -> None:
        """Tell the peer, once, that this process is done with all its groups."""
        if self.connection.lost is None and not self.departed and not self.forked:
            self.departed = True
            try:
                self.connection.send_json(Bye(clean=clean, reason=clip(reason)))
            except FrogError:
                pass

    # ---------------------------------------------- messages (leader's thread)
    def _dispatch(self, message: Datagram) -> None:
        if type(message) is Result:
            group = self._groups.get(message.handle)
            if group is not None:
                group.on_result(message)
            return
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    def _on_welcome(self, message: Welcome) -> None:
        self._greeting.resolve(message)

    def _on_leased(self, message: Leased) -> None:
        self.leases.on_leased(message)
        self._start_queued()

    def _on_freed(self, message: Freed) -> None:
        key = (message.handle, message.seq)
        with self._writing_lock:
            if key in self._writing:  # the op failed while another thread copies: that thread gives it back
                self._writing[key] = True
                return
        block = self._held.pop(key, None)
        if block is not None:
            self.leases.give_back(block)
            self._start_queued()

    def _start_queued(self) -> None:
        for group in list(self._groups.values()):
            if not group.done:
                group.start_queued()
                group.mail.freed()

    def _on_arrived(self, message: Arrived) -> None:
        group = self._groups.get(message.handle)
        if group is not None:
            group.mail.on_arrived(message)

    def _on_mail_asked(self, message: MailAsked) -> None:
        group = self._groups.get(message.handle)
        if group is not None:
            group.mail.on_asked(message)

    def _on_mail_done(self, message: MailDone) -> None:
        if self.given.done(message.handle, (message.dst, message.n)):
            self._start_queued()
        group = self._groups.get(message.handle)
        if group is not None:
            group.mail.on_done(message)

    def _on_mail_failed(self, message: MailFailed) -> None:
        group = self._groups.get(message.handle)
        if group is not None:
            group.mail.on_failed(message)

    def _on_joined(self, message: Joined) -> None:
        reply = self._joins.get(message.handle)
        if reply is not None:
            reply.resolve()

    def _on_failed(self, message: Failed) -> None:
        error = from_code(message.code, message.text)
        reply = self._joins.get(message.handle)
        group = self._groups.get(message.handle)
        if group is not None:
            group.fail(message.seq, error)
        if reply is not None:
            reply.resolve(error=error)

    def _on_explained(self, message: Explained) -> None:
        with self._lock:
            replies = self._explains.pop((message.handle, message.seq), [])
        for reply in replies:
            reply.resolve(message.text)
        group = self._groups.get(message.handle)
        if group is not None and message.seq >= MAIL_SEQ:
            group.mail.on_explained(message.seq, message.text)
        elif group is not None:
            group.on_explained(message.seq, message.text)

    def _on_verified(self, message: Verified) -> None:
        group = self._groups.get(message.handle)
        if group is not None:
            group.on_verified(message.seq)

    def _on_note(self, message: Note) -> None:
        group = self._groups.get(message.handle)
        logger.warning("group %r: %s", group.name if group else "?", message.text)

    def _on_peeked(self, message: Peeked) -> None:
        with self._lock:
            reply = self._peeks.popleft() if self._peeks else None
        if reply is not None:
            reply.resolve(message.snapshot)

    def _on_error(self, message: Error) -> None:
        error = from_code(message.code, message.text)
        if not self._greeting.done:
            self._greeting.resolve(error=error)
        elif self.leases.on_refused(message.req, error):
            self._start_queued()
        else:
            logger.error("this machine's peer refused a request: %s: %s", message.code, message.text)

    def _tick(self, now: float) -> None:
        for group in list(self._groups.values()):
            group.tick(now)

    def _on_lost(self, error: FrogError) -> None:
        self._greeting.resolve(error=error)
        for reply in list(self._joins.values()):
            reply.resolve(error=error)
        for group in list(self._groups.values()):
            group.fail(0, error)
