"""The peer table, driven by hand and over a tiny virtual network. No sockets, no clock."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.peernet import Network, identity

from frogzmq.errors import ConfigError
from frogzmq.machine import (
    Attach,
    Dial,
    Hangup,
    LinkDown,
    LinkReceived,
    LinkUp,
    PeerDown,
    PeerUp,
    Received,
    Reply,
    SendLink,
    Tick,
)
from frogzmq.proto.links import RateMeter, RttEstimate
from frogzmq.proto.peers import PeerTable
from frogzmq.proto.settings import LAN, WAN, CoreSettings
from frogzmq.types import PeerId
from frogzmq.wire.messages import Bye, Hello, Identity, Ping, Pong, Refuse, Welcome

ALICE = identity(1, "alice")
BOB = identity(2, "bob")
AT_BOB = BOB.endpoints[0]
BOB_ID = PeerId(BOB.peer)


def table(me: Identity = ALICE, **changes: float) -> PeerTable:
    return PeerTable(me, dataclasses.replace(CoreSettings(), **changes), Random(1))


def attached(at: float = 0.0) -> PeerTable:
    """Alice with a link to Bob that is up since ``at``."""
    alice = table()
    alice.learn(BOB, at)
    alice.handle(LinkUp(AT_BOB), at)
    alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), at)
    return alice


def advance(peers: PeerTable, start: float, until: float) -> list[object]:
    """Tick at every deadline up to ``until``."""
    out: list[object] = []
    now = start
    while peers.deadline <= until:
        now = max(now, peers.deadline)
        out += peers.handle(Tick(), now)
        peers.check()
    return out


def only(effects: list[object], kind: type) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]


# ------------------------------------------------------------------------ one table
def test_a_learnt_peer_is_dialled_greeted_and_attached():
    alice = table()
    assert alice.learn(BOB, 0.0) == [Dial(AT_BOB, "")]
    assert not alice.is_up(BOB_ID)
    assert alice.handle(LinkUp(AT_BOB), 0.1) == [SendLink(AT_BOB, Hello(who=ALICE))]
    out = alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), 0.2)
    assert out[:2] == [Attach(BOB_ID, AT_BOB, "tcp://10.0.0.2:7001"), PeerUp(BOB_ID, 1)]
    assert isinstance(out[2].message, Ping)
    assert alice.is_up(BOB_ID)
    assert alice.epoch(BOB_ID) == 1
    assert alice.who(BOB_ID) == BOB
    assert alice.learn(BOB, 0.3) == []


def test_pong_gives_the_round_trip_time():
    alice = attached()
    nonce = 1
    alice.handle(LinkReceived(AT_BOB, Pong(nonce=nonce, sent=-99.0)), 0.04)
    assert alice.rtt(BOB_ID) == pytest.approx(0.04)
    alice.handle(LinkReceived(AT_BOB, Pong(nonce=nonce, sent=0.0)), 5.0)  # a repeated one counts for nothing
    assert alice.rtt(BOB_ID) == pytest.approx(0.04)


def test_peers_of_one_network_namespace_meet_on_loopback_without_encryption():
    near = BOB.model_copy(update={"netns": ALICE.netns, "key": "k" * 40})
    alice = table()
    assert alice.learn(near, 0.0) == [Dial("tcp://127.0.0.1:7000", "")]
    alice.handle(LinkUp("tcp://127.0.0.1:7000"), 0.0)
    out = alice.handle(LinkReceived("tcp://127.0.0.1:7000", Welcome(who=near)), 0.0)
    assert only(out, Attach)[0].pub_endpoint == "tcp://127.0.0.1:7001"


def test_other_addresses_are_dialled_with_the_key():
    far = BOB.model_copy(update={"key": "k" * 40})
    assert table().learn(far, 0.0) == [Dial(AT_BOB, "k" * 40)]


def test_a_refused_address_gives_way_to_the_next_at_once():
    bob = identity(2, "bob", endpoints=["tcp://10.0.0.2:7000", "tcp://192.168.0.2:7000"])
    alice = table()
    alice.learn(bob, 0.0)
    out = alice.handle(LinkDown("tcp://10.0.0.2:7000", "connection refused"), 0.01)
    assert out == [Hangup("tcp://10.0.0.2:7000"), Dial("tcp://192.168.0.2:7000", "")]
    alice.handle(LinkUp("tcp://192.168.0.2:7000"), 0.02)
    out = alice.handle(LinkReceived("tcp://192.168.0.2:7000", Welcome(who=bob)), 0.03)
    assert only(out, Attach)[0].pub_endpoint == "tcp://192.168.0.2:7001"


def test_a_silent_address_gives_way_after_the_hello_timeout():
    bob = identity(2, "bob", endpoints=["tcp://10.0.0.2:7000", "tcp://192.168.0.2:7000"])
    alice = table()
    alice.learn(bob, 0.0)
    assert alice.handle(Tick(), 1.9) == []
    assert alice.deadline == pytest.approx(2.0)
    assert alice.handle(Tick(), 2.0) == [Hangup("tcp://10.0.0.2:7000"), Dial("tcp://192.168.0.2:7000", "")]


def test_unreachable_names_every_address_what_happened_and_the_direction():
    bob = identity(2, "bob", endpoints=["tcp://10.0.0.2:7000", "tcp://192.168.0.2:7000"])
    alice = table()
    now, out = 0.0, alice.learn(bob, 0.0)
    while not only(out, PeerDown):
        for effect in only(out, Dial):
            if effect.endpoint.startswith("tcp://10."):
                out += alice.handle(LinkDown(effect.endpoint, "connection refused"), now)
        now = alice.deadline
        out = alice.handle(Tick(), now)
    assert now <= 20.0
    reason = only(out, PeerDown)[0].reason
    assert "alice -> bob" in reason
    assert "tcp://10.0.0.2:7000: connection refused" in reason
    assert "tcp://192.168.0.2:7000: no connection in time" in reason
    assert "nothing came from it to us" in reason
    assert not alice.is_up(BOB_ID)


def test_unreachable_says_when_only_one_way_is_blocked():
    alice = table()
    alice.learn(BOB, 0.0)
    out = alice.handle(Received(BOB_ID, "1", b"r", Hello(who=BOB)), 1.0)
    assert out == [Reply(b"r", Welcome(who=ALICE))]
    downs = only(advance(alice, 1.0, 21.0), PeerDown)
    assert len(downs) == 1
    assert "only the way from here to there is blocked" in downs[0].reason


def test_a_peer_without_addresses_fails_at_once():
    out = table().learn(identity(2, "bob", endpoints=[]), 0.0)
    assert "no address" in only(out, PeerDown)[0].reason


def test_an_address_where_somebody_else_answers_does_not_count():
    alice = table()
    alice.learn(BOB, 0.0)
    alice.handle(LinkUp(AT_BOB), 0.0)
    out = alice.handle(LinkReceived(AT_BOB, Welcome(who=identity(3, "carol"))), 0.1)
    assert not only(out, PeerUp)
    assert Hangup(AT_BOB) in out
    assert "answered by carol" in str(alice.snapshot(0.1)[0]["tried"])


def test_an_address_that_leads_back_to_ourselves_does_not_count():
    alice = table()
    alice.seed(AT_BOB, 0.0)
    alice.handle(LinkUp(AT_BOB), 0.0)
    assert alice.handle(LinkReceived(AT_BOB, Welcome(who=ALICE)), 0.0) == [Hangup(AT_BOB)]
    assert not only(advance(alice, 0.0, 1000.0), Dial)
    assert alice.snapshot(0.0)[0]["state"] == "self"


def test_silence_is_slow_first_and_dead_later():
    alice = attached()
    assert not only(advance(alice, 0.0, 11.9), PeerDown)
    assert alice.snapshot(11.9)[0]["state"] == "slow"
    assert alice.is_up(BOB_ID)
    downs = only(advance(alice, 11.9, 12.1), PeerDown)
    assert "nothing heard for 12.0 s" in downs[0].reason
    assert not alice.is_up(BOB_ID)


def test_chunks_count_as_life():
    alice = attached()
    for second in range(1, 40):
        alice.heard(BOB_ID, float(second), nbytes=1000)
        assert not only(advance(alice, second, second + 0.99), PeerDown)
    row = alice.snapshot(39.0)[0]
    assert row["state"] == "up"
    assert row["received_bytes"] == 39_000
    assert row["received_bytes_per_s"] > 500


def test_a_dead_peer_that_speaks_again_is_dialled_and_comes_up_with_a_new_epoch():
    alice = attached()
    assert only(advance(alice, 0.0, 12.1), PeerDown)
    out = alice.handle(Received(BOB_ID, "1", b"r", Ping(nonce=1, sent=0.0)), 12.2)
    assert only(out, Dial) == [Dial(AT_BOB, "")]
    alice.handle(LinkUp(AT_BOB), 13.7)
    out = alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), 13.8)
    assert PeerUp(BOB_ID, 2) in out


def test_this_process_being_stopped_kills_nobody():
    alice = attached()
    assert not only(alice.handle(Tick(), 60.0), PeerDown)
    assert alice.is_up(BOB_ID)
    alice.handle(LinkReceived(AT_BOB, Pong(nonce=1, sent=0.0)), 60.1)
    assert not only(advance(alice, 60.1, 70.0), PeerDown)


def test_a_connection_that_comes_back_at_once_is_a_new_epoch_without_a_death():
    alice = attached()
    assert alice.handle(LinkDown(AT_BOB, "connection lost"), 1.0) == []
    assert not alice.is_up(BOB_ID)
    assert SendLink(AT_BOB, Hello(who=ALICE)) in alice.handle(LinkUp(AT_BOB), 2.0)
    out = alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), 2.1)
    assert not only(out, PeerDown)
    assert only(out, PeerUp) == [PeerUp(BOB_ID, 2)]


def test_a_reconnection_whose_loss_went_unnoticed_is_a_new_epoch_too():
    alice = attached()
    assert SendLink(AT_BOB, Hello(who=ALICE)) in alice.handle(LinkUp(AT_BOB), 2.0)
    out = alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), 2.1)
    assert only(out, PeerUp) == [PeerUp(BOB_ID, 2)]
    assert not only(out, PeerDown)


def test_a_peer_that_answers_slowly_is_given_more_time_in_every_round():
    alice = table()
    now, out, dialled = 0.0, alice.learn(BOB, 0.0), 0.0
    while now - dialled < 5.0:
        dialled = now if only(out, Dial) else dialled
        now = alice.deadline
        out = alice.handle(Tick(), now)
        assert not only(out, PeerDown)


def test_a_connection_that_stays_closed_is_a_death():
    alice = attached()
    alice.handle(LinkDown(AT_BOB, "connection lost"), 1.0)
    downs = only(advance(alice, 1.0, 3.6), PeerDown)
    assert len(downs) == 1
    assert "connection to tcp://10.0.0.2:7000 closed (connection lost)" in downs[0].reason
    assert "bob" in downs[0].reason


def test_a_restart_is_told_from_a_reconnection():
    alice = attached()
    alice.handle(LinkDown(AT_BOB, "connection lost"), 1.0)
    alice.handle(LinkUp(AT_BOB), 1.5)
    out = alice.handle(LinkReceived(AT_BOB, Welcome(who=identity(2, "bob", "2"))), 1.6)
    kinds = [type(effect) for effect in out if isinstance(effect, PeerDown | PeerUp)]
    assert kinds == [PeerDown, PeerUp]
    assert "restarted" in only(out, PeerDown)[0].reason
    assert alice.who(BOB_ID).instance == "2"


def test_bye_is_a_death_that_nobody_dials_after():
    alice = attached()
    out = alice.handle(Received(BOB_ID, "1", b"r", Bye(reason="user asked")), 1.0)
    assert "stopped: user asked" in only(out, PeerDown)[0].reason
    assert not only(advance(alice, 1.0, 1000.0), Dial)
    assert Dial(AT_BOB, "") in alice.learn(BOB, 1000.0)


def test_pings_are_answered_where_they_came_from():
    alice = attached()
    out = alice.handle(Received(BOB_ID, "1", b"route", Ping(nonce=7, sent=1.5)), 0.5)
    assert Reply(b"route", Pong(nonce=7, sent=1.5)) in out
    assert table().handle(Received(BOB_ID, "1", b"route", Ping(nonce=7, sent=1.5)), 0.5) == []


def test_a_caller_that_nobody_told_of_is_welcomed_and_dialled_back():
    out = table().handle(Received(BOB_ID, "1", b"r", Hello(who=BOB)), 0.0)
    assert out == [Reply(b"r", Welcome(who=ALICE)), Dial(AT_BOB, "")]


def test_hello_must_carry_the_name_of_its_connection():
    out = table().handle(Received(BOB_ID, "1", b"r", Hello(who=identity(3, "carol"))), 0.0)
    assert only(out, Reply)[0].message.code == "WireError"


def test_a_newcomer_with_the_name_of_a_living_peer_is_refused():
    alice = attached()
    fake = identity(2, "bob2", "2", endpoints=["tcp://10.0.0.9:7000"])
    out = alice.handle(Received(BOB_ID, "2", b"new", Hello(who=fake)), 1.0)
    assert SendLink(AT_BOB, Hello(who=ALICE)) in out
    assert not only(out, Reply)
    out = alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), 1.1)
    refusal = only(out, Reply)[0]
    assert refusal.route == b"new"
    assert refusal.message.code == "DuplicateIdentity"
    assert "bob " in refusal.message.text
    assert "bob2 " in refusal.message.text
    assert not only(out, PeerDown)
    assert alice.epoch(BOB_ID) == 1


def test_a_newcomer_takes_over_when_the_former_one_does_not_answer():
    alice = attached()
    new = identity(2, "bob", "2")
    alice.handle(Received(BOB_ID, "2", b"new", Hello(who=new)), 1.0)
    out = advance(alice, 1.0, 2.5)
    assert "restarted" in only(out, PeerDown)[0].reason
    assert Reply(b"new", Welcome(who=ALICE)) in out
    assert Dial(AT_BOB, "") in out
    late = alice.handle(Received(BOB_ID, "1", b"old", Ping(nonce=1, sent=0.0)), 2.6)
    assert not only(late, Reply)  # not attached yet: nothing is known for sure
    alice.handle(LinkUp(AT_BOB), 2.7)
    alice.handle(LinkReceived(AT_BOB, Welcome(who=new)), 2.8)
    late = alice.handle(Received(BOB_ID, "1", b"old", Ping(nonce=1, sent=0.0)), 2.9)
    assert only(late, Reply)[0].message.code == "DuplicateIdentity"


def test_a_newcomer_takes_over_at_once_when_the_connection_is_closed():
    alice = attached()
    alice.handle(LinkDown(AT_BOB, "connection lost"), 1.0)
    out = alice.handle(Received(BOB_ID, "2", b"new", Hello(who=identity(2, "bob", "2"))), 1.1)
    assert only(out, PeerDown)
    assert Reply(b"new", Welcome(who=ALICE)) in out


def test_a_newcomer_that_waits_takes_over_as_soon_as_the_connection_closes():
    alice = attached()
    new = identity(2, "bob", "2")
    alice.handle(Received(BOB_ID, "2", b"new", Hello(who=new)), 1.0)
    out = alice.handle(LinkDown(AT_BOB, "connection lost"), 1.2)
    assert Reply(b"new", Welcome(who=ALICE)) in out
    assert "restarted" in only(out, PeerDown)[0].reason


def test_a_newcomer_that_already_answers_on_the_old_link_takes_over():
    alice = attached()
    new = identity(2, "bob", "2")
    alice.handle(Received(BOB_ID, "2", b"new", Hello(who=new)), 1.0)
    out = alice.handle(LinkReceived(AT_BOB, Welcome(who=new)), 1.05)
    kinds = [type(effect) for effect in out]
    assert kinds.index(PeerDown) < kinds.index(Reply) < kinds.index(PeerUp)
    assert Reply(b"new", Welcome(who=ALICE)) in out


def test_who_claims_our_own_identity_is_refused_if_it_started_later():
    bob = table(identity(2, "bob", "0005"))
    out = bob.handle(Received(BOB_ID, "0007", b"r", Hello(who=identity(2, "clone", "0007"))), 0.0)
    refusal = only(out, Reply)[0].message
    assert refusal.code == "DuplicateIdentity"
    assert "clone" in refusal.text
    assert "bob" in refusal.text
    assert bob.fatal is None
    out = bob.handle(Received(BOB_ID, "0003", b"r", Hello(who=identity(2, "elder", "0003"))), 0.0)
    assert only(out, Reply)[0].message.code != "DuplicateIdentity"
    assert "elder" in bob.fatal


def test_being_refused_as_a_duplicate_is_fatal():
    alice = table()
    alice.learn(BOB, 0.0)
    alice.handle(LinkUp(AT_BOB), 0.0)
    alice.handle(LinkReceived(AT_BOB, Refuse(code="DuplicateIdentity", text="two of alice")), 0.1)
    assert alice.fatal == "two of alice"


def test_other_refusals_end_the_attempt_with_their_text():
    alice = table()
    alice.learn(BOB, 0.0)
    alice.handle(LinkUp(AT_BOB), 0.0)
    out = alice.handle(LinkReceived(AT_BOB, Refuse(code="PeerUnreachable", text="full house")), 0.1)
    assert "full house" in only(out, PeerDown)[0].reason
    assert alice.fatal is None


def test_another_protocol_version_names_both():
    alice = table()
    alice.learn(BOB, 0.0)
    reason = only(alice.mismatch(AT_BOB, 9, 0.1), PeerDown)[0].reason
    assert "speaks 1" in reason
    assert "speaks 9" in reason
    assert "bob" in reason
    assert alice.mismatch("tcp://10.9.9.9:1", 9, 0.2) == []


def test_a_job_that_names_a_clone_of_ourselves_fails():
    assert "two running peers" in only(table().learn(identity(1, "clone", "9"), 0.0), PeerDown)[0].reason
    assert table().learn(ALICE, 0.0) == []


def test_seeds_are_dialled_for_ever_but_not_often():
    alice = table()
    out = list(alice.seed(AT_BOB, 0.0))
    now, dials = 0.0, 0
    while now < 300.0:
        dials += len(only(out, Dial))
        out = [e for d in only(out, Dial) for e in alice.handle(LinkDown(d.endpoint, "refused"), now)]
        now = alice.deadline
        out += alice.handle(Tick(), now)
        alice.check()
    assert 8 <= dials <= 20
    assert alice.deadline - now <= 30.0
    assert "refused" in str(alice.snapshot(now)[0]["tried"])


def test_a_seed_becomes_a_peer_once_it_answers_and_two_seeds_of_one_peer_share_a_link():
    alice = table()
    alice.seed("tcp://bob.lan:7000", 0.0)
    alice.seed(AT_BOB, 0.0)
    alice.handle(LinkUp("tcp://bob.lan:7000"), 0.1)
    out = alice.handle(LinkReceived("tcp://bob.lan:7000", Welcome(who=BOB)), 0.2)
    assert only(out, Attach) == [Attach(BOB_ID, "tcp://bob.lan:7000", "tcp://bob.lan:7001")]
    alice.handle(LinkUp(AT_BOB), 0.3)
    assert alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), 0.4) == [Hangup(AT_BOB)]
    assert len(alice.snapshot(0.5)) == 1
    assert alice.forget(BOB_ID) == []
    alice.check()


def test_forgotten_peers_are_hung_up_and_cost_nothing():
    alice = attached()
    assert alice.forget(BOB_ID) == [Hangup(AT_BOB)]
    assert alice.snapshot(1.0) == []
    assert advance(alice, 1.0, 100.0) == []
    assert alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), 101.0) == []


def test_the_number_of_peers_is_bounded_and_dead_ones_make_room():
    alice = table(max_peers=2)
    alice.learn(identity(2, "b", endpoints=[]), 0.0)  # unreachable at once
    alice.learn(identity(3, "c"), 0.0)
    alice.learn(identity(4, "d"), 1.0)
    assert [row["name"] for row in alice.snapshot(1.0)] == ["c", "d"]
    out = alice.learn(identity(5, "e"), 2.0)
    assert "limit" in only(out, PeerDown)[0].reason
    out = alice.handle(Received(PeerId(f"{6:016x}"), "1", b"r", Hello(who=identity(6, "f"))), 2.0)
    assert only(out, Reply)[0].message.code == "PeerUnreachable"


def test_two_peers_that_name_the_same_address_take_turns():
    alice = table()
    twin = identity(3, "carol", endpoints=[AT_BOB])
    alice.learn(BOB, 0.0)
    assert not only(alice.learn(twin, 0.0), Dial)
    out = alice.handle(LinkUp(AT_BOB), 0.1) + alice.handle(LinkReceived(AT_BOB, Welcome(who=BOB)), 0.1)
    assert PeerUp(BOB_ID, 1) in out
    reason = ""
    for second in range(1, 25):
        alice.heard(BOB_ID, float(second))
        for notice in only(advance(alice, second, second + 0.99), PeerDown):
            reason = notice.reason
    assert "in use for bob" in reason
    assert alice.is_up(BOB_ID)


# -------------------------------------------------------------- estimates, settings
def test_rtt_is_smoothed_as_rfc_6298_says():
    rtt = RttEstimate()
    rtt.sample(0.1)
    assert (rtt.smoothed, rtt.variation) == (0.1, 0.05)
    rtt.sample(0.2)
    assert rtt.smoothed == pytest.approx(0.1125)
    assert rtt.variation == pytest.approx(0.05 + (0.1 - 0.05) / 4)
    rtt.sample(-1.0)
    assert rtt.least == 0.1
    assert rtt.timeout == pytest.approx(0.1125 + 4 * 0.0625)


def test_rates_converge_and_fade():
    meter = RateMeter()
    for tick in range(200):
        meter.add(10_000, tick * 0.1)
    assert meter.rate(19.9) == pytest.approx(100_000, rel=0.05)
    assert meter.rate(60.0) < 1.0
    assert meter.total == 2_000_000


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("slow_after_s", 99.0), ("probe_timeout_s", 3.0)])
def test_settings_that_cannot_work_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(CoreSettings(), **{name: value})


def test_presets_differ_from_the_defaults():
    assert LAN.silent_dead_after_s < CoreSettings().silent_dead_after_s < WAN.silent_dead_after_s


# -------------------------------------------------------------------- two and more
def test_two_tables_meet_and_stay_up():
    net = Network()
    alice, bob = net.start(ALICE), net.start(BOB)
    alice.take(alice.table.learn(BOB, 0.0))
    net.run(60.0)
    assert alice.ups() == [1]
    assert bob.ups() == [1]
    assert not alice.downs()
    assert not bob.downs()
    assert alice.table.rtt(BOB_ID) == pytest.approx(0.02, rel=0.3)
    assert alice.dials == bob.dials == 1


def test_a_killed_peer_is_noticed_soon_and_its_successor_at_once():
    net = Network()
    alice, bob = net.start(ALICE), net.start(BOB)
    alice.take(alice.table.learn(BOB, 0.0))
    net.run(5.0)
    net.kill(bob)
    net.run(8.0)
    assert len(alice.downs()) == 1
    again = net.start(identity(2, "bob", "2"))
    again.take(again.table.learn(ALICE, net.now))
    net.run(8.5)
    assert alice.table.is_up(BOB_ID)
    assert again.table.is_up(PeerId(ALICE.peer))
    assert alice.table.who(BOB_ID).instance == "2"


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_restart_within_half_a_second_takes_over(seed, stopped):
    net = Network(seed)
    alice, bob = net.start(ALICE), net.start(BOB)
    alice.take(alice.table.learn(BOB, 0.0))
    net.run(3.0)
    alice.paused = stopped
    net.kill(bob)
    net.run(3.5)
    again = net.start(identity(2, "bob", "2"))
    again.take(again.table.learn(ALICE, net.now))
    net.run(6.0)
    alice.resume()
    net.run(8.5)
    assert alice.table.is_up(BOB_ID)
    assert again.table.is_up(PeerId(ALICE.peer))
    assert alice.table.who(BOB_ID).instance == "2"
    assert any("restarted" in reason for reason in alice.downs())
    assert again.table.fatal is None
    assert alice.table.fatal is None


def test_of_two_living_peers_with_one_identity_the_newcomer_stops():
    net = Network()
    alice, bob = net.start(ALICE), net.start(BOB)
    alice.take(alice.table.learn(BOB, 0.0))
    net.run(3.0)
    clone = net.start(identity(2, "clone", "2", endpoints=["tcp://10.0.0.9:7000"]))
    clone.take(clone.table.learn(ALICE, net.now))
    net.run(5.0)
    assert clone.table.fatal is not None
    assert "bob" in clone.table.fatal
    assert bob.table.fatal is None
    assert not alice.downs()
    assert alice.table.who(BOB_ID).instance == "1"


def test_a_cut_is_a_death_on_both_sides_and_healing_brings_both_back():
    net = Network()
    alice, bob = net.start(ALICE), net.start(BOB)
    alice.take(alice.table.learn(BOB, 0.0))
    net.run(5.0)
    net.silent.add(frozenset(("alice", "bob")))
    net.run(20.0)
    assert len(alice.downs()) == len(bob.downs()) == 1
    net.silent.clear()
    net.run(60.0)
    assert alice.table.is_up(BOB_ID)
    assert bob.table.is_up(PeerId(ALICE.peer))
    assert len(alice.ups()) == 2


def test_a_peer_that_stalls_for_eight_seconds_is_slow_and_not_dead():
    net = Network()
    alice, bob = net.start(ALICE), net.start(BOB)
    alice.take(alice.table.learn(BOB, 0.0))
    net.run(5.0)
    bob.paused = True
    net.run(11.0)
    assert alice.table.snapshot(net.now)[0]["state"] == "slow"
    net.run(13.0)
    bob.resume()
    net.run(14.0)
    assert alice.table.snapshot(net.now)[0]["state"] == "up"
    assert not alice.downs()
    assert not bob.downs()


def test_fifty_seeds_that_come_back_are_all_connected_within_a_minute():
    net = Network()
    alice = net.start(ALICE)
    others = [identity(number, f"p{number}") for number in range(2, 50)]
    net.holes = {who.endpoints[0] for who in others[::2]}
    for who in others:
        alice.take(alice.table.seed(who.endpoints[0], 0.0))
    net.run(300.0)
    assert alice.dials <= 20 * len(others)
    net.holes.clear()
    for who in others:
        net.start(who)
    net.run(360.0)
    assert all(alice.table.is_up(PeerId(who.peer)) for who in others)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    loss=st.sampled_from([0.0, 0.1, 0.3]),
    delay=st.sampled_from([0.001, 0.05, 0.25]),
    faults=st.lists(
        st.tuples(st.sampled_from(["cut", "heal", "restart", "pause", "resume"]), st.integers(1, 30))
    ),
)
def test_whatever_happens_everyone_is_up_again_after_healing(seed, loss, delay, faults):
    net = Network(seed, delay, loss)
    alice, bob = net.start(ALICE), net.start(BOB)
    alice.take(alice.table.seed(AT_BOB, 0.0))
    bob.take(bob.table.seed(ALICE.endpoints[0], 0.0))
    starts = 1
    for fault, wait in faults:
        if fault == "cut":
            net.silent.add(frozenset(("alice", "bob")))
        elif fault == "heal":
            net.silent.clear()
        elif fault == "restart":
            starts += 1
            net.kill(bob)
            bob = net.start(identity(2, "bob", f"{starts:03}"))
            bob.take(bob.table.seed(ALICE.endpoints[0], net.now))
        elif fault == "pause":
            alice.paused = True
        elif alice.paused:
            alice.resume()
        net.run(net.now + wait)
    net.silent.clear()
    net.loss = 0.0
    if alice.paused:
        alice.resume()
    net.run(net.now + 90.0)
    assert alice.table.fatal is None
    assert bob.table.fatal is None
    assert alice.table.is_up(BOB_ID)
    assert bob.table.is_up(PeerId(ALICE.peer))
    assert alice.table.who(BOB_ID).instance == bob.who.instance
    for node in (alice, bob):
        assert node.ups() == sorted(set(node.ups()))
        assert type(node.notices[-1]) is PeerUp
