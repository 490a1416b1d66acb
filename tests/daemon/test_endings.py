"""How a connection between a rank and its peer ends: last words are heard, whatever else was unread."""

from __future__ import annotations

import os
import secrets

import pytest
from support.fleet import Fleet

from frogzmq.client import Client
from frogzmq.descriptor import Descriptor
from frogzmq.errors import PeerUnreachable
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire import ranks
from frogzmq.wire.messages import GroupOptions, JoinGroup, Member

SUM = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (4,))


def test_a_goodbye_counts_though_the_rank_had_not_read_everything(fleet: Fleet) -> None:
    peer = fleet.start()
    other, local = peer.local(), peer.local()
    for rank, conn in enumerate((other, local)):
        conn.join(rank, [conn.welcome.who] * 2)
    other.expect(ranks.Joined)
    other.peek()  # Joined went to both: what local does not read makes the kernel report a reset
    local.say(ranks.Bye(clean=False, reason="ValueError: boom"))
    local.close()
    other.post(1, SUM, bytes(16))
    assert "ValueError: boom" in other.expect(ranks.Failed).text


def test_a_rank_hears_why_though_the_peer_had_not_read_everything(fleet: Fleet) -> None:
    peer = fleet.start()
    client = Client(peer.runtime_dir)
    member = Member(rank=0, pid=os.getpid(), host="test", who=client.welcome.who)
    group = client.join(
        JoinGroup(
            gid=secrets.token_hex(16), job="", name="default", rank=0, size=1, timeout_s=20.0,
            options=GroupOptions(), members=[member],
        )
    )  # fmt: skip
    client.connection.send(b"garbage" * 10)  # answered, and the connection is closed ...
    for _ in range(50):  # ... with some of these unread
        try:
            client.connection.send(ranks.encode_explain(1, 1))
        except PeerUnreachable:
            break
    with pytest.raises(PeerUnreachable):
        group.post(SUM, None, []).wait()
    client.close()
    assert peer.peek()["counters"]["rejected_frames"] == 1


def test_a_client_that_is_abandoned_says_nothing(fleet: Fleet) -> None:
    peer = fleet.start()
    client = Client(peer.runtime_dir)
    client.abandon()
    client.close()
    with pytest.raises(PeerUnreachable):
        client.peek()
    assert peer.wait_for(lambda now: len(now["processes"]) == 1)
