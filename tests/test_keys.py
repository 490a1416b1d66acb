"""The machine's key pair on disk."""

from __future__ import annotations

import os
import threading

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from frogzmq.errors import ConfigError
from frogzmq.keys import KEY_FILE, KeyPair, is_key, load, load_or_create, peer_id_of


def test_a_pair_is_made_once_and_then_read(tmp_path):
    first = load_or_create(tmp_path / "run")
    again = load_or_create(tmp_path / "run")
    assert first == again
    assert zmq.curve_public(first.secret.encode()).decode() == first.public
    path = tmp_path / "run" / KEY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["peer.key"]


def test_two_directories_make_two_identities(tmp_path):
    one, two = load_or_create(tmp_path / "a"), load_or_create(tmp_path / "b")
    assert peer_id_of(one.public) != peer_id_of(two.public)


def test_starters_at_the_same_time_get_one_pair(tmp_path):
    found: list[KeyPair] = []
    threads = [threading.Thread(target=lambda: found.append(load_or_create(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize(("what", "mode"), [("peer.key", 0o644), ("peer.key", 0o620), (".", 0o755)])
def test_what_others_can_read_is_refused(tmp_path, what, mode):
    load_or_create(tmp_path)
    (tmp_path / "keys" / what).chmod(mode)
    with pytest.raises(ConfigError, match=rf"others can get at this (file|directory) \(mode {mode:o}\)"):
        load_or_create(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "one line\n", "a" * 40 + "\n", "a" * 40 + "\n" + "ä" * 40, "x" * 5000]
)
def test_a_damaged_file_is_refused_and_kept(tmp_path, content):
    load_or_create(tmp_path)
    path = tmp_path / KEY_FILE
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="not a key file"):
        load_or_create(tmp_path)
    assert path.read_text(encoding="utf-8") == content


def test_a_symbolic_link_is_refused(tmp_path):
    load_or_create(tmp_path / "a")
    (tmp_path / "b" / "keys").mkdir(parents=True, mode=0o700)
    (tmp_path / "b" / KEY_FILE).symlink_to(tmp_path / "a" / KEY_FILE)
    with pytest.raises(ConfigError, match=r"peer\.key"):
        load(tmp_path / "b" / KEY_FILE)


def test_a_place_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make this machine's key"):
        load_or_create(tmp_path / "file")


def test_the_secret_is_not_printed(tmp_path):
    pair = load_or_create(tmp_path)
    assert pair.secret not in repr(pair)
    assert pair.secret not in f"{pair}"


def test_the_peer_id_is_fixed_for_ever():
    assert peer_id_of("Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID") == "326a48580dc2cf01"


@given(st.text(max_size=60))
def test_peer_ids_have_one_form_and_keys_another(text):
    assert len(peer_id_of(text)) == 16
    assert int(peer_id_of(text), 16) >= 0
    assert not is_key(text) or len(text) == 40
