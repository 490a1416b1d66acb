from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from frogzmq import config
from frogzmq.config import PeerConfig, group_options, load_config, locate_runtime_dir, runtime_dir
from frogzmq.errors import ConfigError
from frogzmq.types import Mode, Order


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "peer.toml"
        path.write_text(text)
        return path

    return write


def test_without_a_file_everything_has_a_default() -> None:
    settings = load_config(env={})
    assert settings == PeerConfig()
    assert (settings.bind, settings.port, settings.secrecy) == ("0.0.0.0", 0, "full")


def test_the_file_in_the_variable_is_read_and_an_explicit_one_wins(tmp_path: Path, toml) -> None:
    env = {"FROGZMQ_CONFIG": str(toml('name = "by-variable"'))}
    other = tmp_path / "other.toml"
    other.write_text('name = "explicit"')
    assert load_config(env=env).name == "by-variable"
    assert load_config(other, env).name == "explicit"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1048576", 1 << 20),
        ("'2GiB'", 2 << 30),
        ("'1.5 MiB'", 3 << 19),
        ("'3MB'", 3_000_000),
        ("'2gib'", 2 << 30),
    ],
)
def test_sizes_may_have_units(toml, text: str, value: int) -> None:
    assert load_config(toml(f"arena_bytes = {text}"), {}).arena_bytes == value


@pytest.mark.parametrize("seed", ["tcp://10.0.0.1:29650", "tcp://box.lan:1", "tcp://[fe80::1%eth0]:65535"])
def test_seeds(toml, seed: str) -> None:
    assert load_config(toml(f"peers = ['{seed}']"), {}).peers == [seed]


def test_an_unknown_key_names_the_file_the_key_and_the_nearest_one(toml) -> None:
    path = toml("arena_byte = 5")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert str(path) in str(caught.value)
    assert "'arena_byte' (did you mean 'arena_bytes'?)" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("port = 70000", ["port = 70000", "less than 65536"]),
        ("port = true", ["port = True", "integer"]),
        ("port = '80'", ["port = '80'", "integer"]),
        ("secrecy = 'none'", ["secrecy = 'none'", "'full' or 'off'"]),
        ("arena_bytes = '2 frogs'", ["arena_bytes = '2 frogs'", "2GiB"]),
        ("arena_bytes = 5", ["arena_bytes = 5", "1048576"]),
        ("peers = ['1.2.3.4:5']", ["peers.0 = '1.2.3.4:5'", "tcp://"]),
        ("peers = ['tcp://a:0']", ["peers.0 = 'tcp://a:0'", "tcp://"]),
        ("peers = ['tcp://a:99999']", ["peers.0", "tcp://"]),
        ("advertise = ['1.2.3.4:55']", ["advertise.0 = '1.2.3.4:55'", "without a port"]),
        ("lanes = 0", ["lanes = 0", "1"]),
        ("log_level = 'loud'", ["log_level = 'loud'", "'debug'"]),
        ("port = = 1", ["not a TOML file", "line 1"]),
    ],
)
def test_a_wrong_value_names_the_key_the_value_and_what_is_allowed(toml, text: str, parts: list[str]) -> None:
    path = toml(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml: cannot read the configuration: No such file"):
        load_config(tmp_path / "nowhere.toml", {})


def test_a_binary_file_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a TOML file"):
        load_config(tmp_path / "x", {})


def test_the_log_level_variable_wins(toml) -> None:
    assert load_config(toml("log_level = 'error'"), {"FROGZMQ_LOG_LEVEL": "debug"}).log_level == "debug"
    with pytest.raises(ConfigError, match="FROGZMQ_LOG_LEVEL: 'debgu' .*did you mean 'debug'"):
        load_config(env={"FROGZMQ_LOG_LEVEL": "debgu"})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        PeerConfig().port = 5  # type: ignore[misc]


def test_group_options_arguments_win_over_variables_and_those_over_defaults() -> None:
    env = {"FROGZMQ_MODE": "shard", "FROGZMQ_ORDER": "rank"}
    assert (group_options({}).mode, group_options({}).order) == (Mode.AUTO, Order.MACHINE)
    assert (group_options(env).mode, group_options(env).order) == (Mode.SHARD, Order.RANK)
    mixed = group_options(env, mode="faithful")
    assert (mixed.mode, mixed.order) == (Mode.FAITHFUL, Order.RANK)


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert group_options({"FROGZMQ_MODE": "", "FROGZMQ_ORDER": ""}).mode == Mode.AUTO


@pytest.mark.parametrize(
    ("env", "mode", "order", "text"),
    [
        ({"FROGZMQ_MODE": "sharp"}, None, None, "FROGZMQ_MODE: 'sharp' .*'shard'.*auto, shard, faithful"),
        ({"FROGZMQ_ORDER": "rnak"}, None, None, "FROGZMQ_ORDER: 'rnak' .*'rank'.*machine, rank"),
        ({}, "fast", None, "^mode: 'fast'"),
        ({}, None, "ring", "^order: 'ring'"),
        ({}, None, "", "^order: ''"),
    ],
)
def test_wrong_options_name_where_they_came_from(env, mode, order, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        group_options(env, mode, order)


def test_the_runtime_dir_is_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = runtime_dir({"FROGZMQ_RUNTIME_DIR": str(tmp_path / "a" / "b")})
    finally:
        os.umask(before)
    assert made == tmp_path / "a" / "b"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert runtime_dir({"FROGZMQ_RUNTIME_DIR": str(made)}) == made


def test_the_runtime_dir_is_found_in_this_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(config.tempfile, "gettempdir", lambda: str(tmp_path))
    xdg = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert locate_runtime_dir({})[0] == tmp_path / f"frogzmq-{os.getuid()}"
    assert locate_runtime_dir({"XDG_RUNTIME_DIR": "/nowhere/at/all"}) == locate_runtime_dir({})
    assert locate_runtime_dir(xdg)[0] == tmp_path / "frogzmq"
    assert locate_runtime_dir(xdg | {"FROGZMQ_RUNTIME_DIR": "/x/y"})[0] == Path("/x/y")
    assert locate_runtime_dir(xdg | {"FROGZMQ_RUNTIME_DIR": "/x/y"}, Path("/z"))[0] == Path("/z")
    assert not any(tmp_path.iterdir())


def test_a_runtime_dir_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match=r"FROGZMQ_RUNTIME_DIR: .* \(mode 0750\); run: chmod 700"):
        runtime_dir({"FROGZMQ_RUNTIME_DIR": str(tmp_path)})


def test_nobody_is_told_to_lock_the_temporary_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="use one inside it: ") as caught:
        runtime_dir({"FROGZMQ_RUNTIME_DIR": str(tmp_path)})
    assert "chmod" not in str(caught.value)


def test_a_runtime_dir_of_another_user_is_refused(tmp_path: Path, monkeypatch) -> None:
    theirs = tmp_path.stat().st_uid + 1
    monkeypatch.setattr(config.os, "getuid", lambda: theirs)
    with pytest.raises(ConfigError, match="belongs to user"):
        runtime_dir({"FROGZMQ_RUNTIME_DIR": str(tmp_path)})


def test_a_planted_link_in_the_temporary_folder_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(config.tempfile, "gettempdir", lambda: str(tmp_path))
    target = tmp_path / "mine"
    target.mkdir(mode=0o700)
    (tmp_path / f"frogzmq-{os.getuid()}").symlink_to(target)
    with pytest.raises(ConfigError, match="is not a folder"):
        runtime_dir({})


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot make the folder"):
            runtime_dir({"FROGZMQ_RUNTIME_DIR": str(path)})


@pytest.mark.parametrize(("extra", "fits"), [(0, True), (1, False)])
def test_a_path_too_long_for_a_unix_socket_is_refused(tmp_path: Path, extra: int, fits: bool) -> None:
    room = config.MAX_SOCKET_PATH - len(f"{tmp_path}//{config.SOCKET_NAME}") + extra
    path = tmp_path / ("x" * room)
    if fits:
        assert runtime_dir({"FROGZMQ_RUNTIME_DIR": str(path)}) == path
        return
    with pytest.raises(ConfigError, match="108 bytes, a unix socket allows 107"):
        runtime_dir({"FROGZMQ_RUNTIME_DIR": str(path)})
    assert not path.exists()


def test_unknown_variables_are_told_with_the_nearest_name() -> None:
    texts = config.unknown_variables(
        {"FROGZMQ_MOD": "1", "FROGZMQ_XYZZY": "1", "FROGZMQ_MODE": "auto", "FROG": "1"}
    )
    assert len(texts) == 2
    assert "FROGZMQ_MOD (did you mean FROGZMQ_MODE?)" in texts[0]
    assert "did you mean" not in texts[1]


def test_an_unknown_variable_is_warned_about_once() -> None:
    env = {"FROGZMQ_ORDERS": "rank"}
    with pytest.warns(UserWarning, match="FROGZMQ_ORDERS .*FROGZMQ_ORDER"):
        config.warn_unknown_variables(env)
    config.warn_unknown_variables(env)  # a second warning would be an error here


@pytest.mark.parametrize("name", ["receipts", "verify"])
def test_receipts_are_off_unless_asked_for(name: str) -> None:
    from frogzmq.config import group_options

    variable = f"FROGZMQ_{name.upper()}"
    assert not group_options({}).witness
    assert getattr(group_options({variable: "1"}), name)
    assert not getattr(group_options({variable: "1"}, **{name: False}), name)
    with pytest.raises(ConfigError, match=variable):
        group_options({variable: "maybe"})
