"""A group is settled, and its ops may run, only when each of its machines can be sent to."""

from __future__ import annotations

import random

from support.peernet import identity

from frogzmq.machine import Joined, LinkReceived, LinkUp, RankJoined, Received
from frogzmq.proto.joining import agreed, members_digest
from frogzmq.proto.peer import PeerCore
from frogzmq.proto.settings import CoreSettings
from frogzmq.types import ConnId, PeerId
from frogzmq.wire.messages import GroupOptions, GroupReady, Hello, JoinGroup, Member, Welcome


def test_who_is_heard_before_it_can_be_reached_does_not_settle_the_group() -> None:
    settings = CoreSettings()
    a, b = identity(1, "a"), identity(2, "b")
    core = PeerCore(a, settings, random.Random(1))
    members = [Member(rank=rank, pid=rank + 1, host=who.name, who=who) for rank, who in enumerate((a, b))]
    join = JoinGroup(
        gid="ab" * 16, job="", name="default", rank=0, size=2, timeout_s=30.0, options=GroupOptions(),
        members=members,
    )  # fmt: skip
    ready = GroupReady(
        gid=join.gid, ranks=[1], members=members_digest(join), options=agreed(join, settings), settled=False
    )
    endpoint = b.endpoints[0]
    effects = core.handle(RankJoined(ConnId(1), join), 0.0)
    for message in (Hello(who=b), ready):  # b reaches us first
        effects += core.handle(Received(PeerId(b.peer), b.instance, b"route", message), 0.1)
    assert not any(isinstance(effect, Joined) for effect in effects)
    effects = core.handle(LinkUp(endpoint), 0.2)
    effects += core.handle(LinkReceived(endpoint, Welcome(who=b)), 0.3)
    assert [effect.rank for effect in effects if isinstance(effect, Joined)] == [0]
