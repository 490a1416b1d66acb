"""The shared-memory files: what is given out, what is refused, what is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frogzmq.errors import DuplicateIdentity, PeerUnreachable, StoreFull, WireError
from frogzmq.store import arena as arena_module
from frogzmq.store import place as place_module
from frogzmq.store.arena import Arena
from frogzmq.store.index import GRAIN, Extent
from frogzmq.store.map import ArenaMap
from frogzmq.store.place import arena_directory

MIB = 1 << 20


class Setup:
    """An arena in two directories of ``tmp_path`` and the warnings it gave."""

    def __init__(self, tmp_path: Path, **options: int) -> None:
        self.warnings: list[str] = []
        self.first, self.second = tmp_path / "first", tmp_path / "second"
        self.arena = Arena(self.first, fallback=self.second, warn=self.warnings.append, **options)


@pytest.fixture
def small(tmp_path: Path):
    setup = Setup(tmp_path, max_bytes=8 * MIB)
    yield setup
    setup.arena.close()


def test_a_rank_sees_what_the_peer_writes_and_the_other_way_round(small: Setup) -> None:
    extent = small.arena.lease("rank", 100_000)
    mine = small.arena.view(extent.seg, extent.off, 100_000, owner="rank")
    rank = ArenaMap(small.arena.paths)
    theirs = rank.view(extent.seg, extent.off, 100_000)
    theirs[:] = np.arange(100_000, dtype=np.uint32).astype(np.uint8)
    assert np.array_equal(mine, theirs)
    mine[7] = 99
    assert theirs[7] == 99
    rank.populate(*extent)
    assert theirs[7] == 99
    rank.close()


def test_segments_that_appear_later_are_found(small: Setup) -> None:
    rank = ArenaMap(small.arena.paths)  # before the first segment exists
    extent = small.arena.lease("rank", 10)
    small.arena.view(*extent)[0] = 5
    assert rank.view(extent.seg, extent.off, 1)[0] == 5
    with pytest.raises(PeerUnreachable, match=r"segment 9 is not in .*first.*second"):
        rank.view(9, 0, 1)
    with pytest.raises(WireError, match="outside"):
        rank.view(extent.seg, arena_module.SEGMENT_BYTES, 1)


def test_only_leased_bytes_can_be_viewed(small: Setup) -> None:
    extent = small.arena.lease("rank", GRAIN)
    for seg, off, size in ((0, 0, GRAIN + 1), (0, GRAIN, 1), (7, 0, 1), (0, 1 << 50, 1), (0, -8, 4)):
        with pytest.raises(WireError, match="leased to nobody"):
            small.arena.view(seg, off, size)
    with pytest.raises(WireError, match="the peer or another rank"):
        small.arena.view(*extent, owner="other")
    assert small.arena.locate(small.arena.view(0, 64, 8)) == (0, 64)
    assert small.arena.locate(np.zeros(8, np.uint8)) is None


def test_full_says_how_much_is_needed_and_where(small: Setup) -> None:
    small.arena.lease("a", 6 * MIB)
    with pytest.raises(StoreFull) as caught:
        small.arena.lease("b", 3 * MIB)
    text = str(caught.value)
    for part in (str(3 * MIB), str(6 * MIB), str(8 * MIB), str(small.first), "bytes free", "arena_bytes"):
        assert part in text
    assert small.warnings == []
    assert small.arena.lease("b", 2 * MIB).size == 2 * MIB, "a refusal must not cost room"


def test_idle_bytes_make_way_for_other_sizes(small: Setup) -> None:
    for _ in range(3):
        for size in (3 * MIB, 5 * MIB, 8 * MIB, 100_000):
            extents = [small.arena.lease("a", size) for _ in range(8 * MIB // -(-size // GRAIN * GRAIN) or 1)]
            assert len({(e.seg, e.off) for e in extents}) == len(extents)
            assert small.arena.reclaim("a") == sum(e.size for e in extents)
    assert small.arena.usage()["leased_bytes"] == 0


def test_a_dead_owner_frees_all_but_what_is_pinned(small: Setup) -> None:
    kept = small.arena.lease("rank", MIB)
    small.arena.lease("rank", MIB)
    pinned = small.arena.pin(kept.seg, kept.off + 5)
    assert pinned == kept
    assert small.arena.reclaim("rank") == MIB
    assert small.arena.lease("other", MIB) != kept
    assert small.arena.lease("other", MIB) != kept
    small.arena.unpin(kept)
    assert small.arena.lease("other", MIB) == kept


def test_idle_bytes_beyond_the_bound_go_back_to_the_system(tmp_path: Path) -> None:
    setup = Setup(tmp_path, max_bytes=64 * MIB, idle_bytes=2 * MIB)
    extents = [setup.arena.lease("a", MIB) for _ in range(8)]
    for extent in extents:
        setup.arena.view(*extent)[:] = 1
    path = Path(setup.arena.paths[0])
    assert path.stat().st_blocks * 512 >= 8 * MIB
    for extent in extents:
        setup.arena.release(extent)
    assert setup.arena.usage()["idle_bytes"] == 2 * MIB
    assert path.stat().st_blocks * 512 < 4 * MIB
    again = [setup.arena.lease("a", MIB) for _ in range(2)]
    assert again == [extents[7], extents[6]], "the block used last is kept and handed out first"
    setup.arena.reclaim("a")
    assert setup.arena.trim() == 2 * MIB
    assert path.stat().st_blocks * 512 < MIB
    setup.arena.close()


def test_everything_is_private_and_gone_after_close(small: Setup) -> None:
    extent = small.arena.lease("a", MIB)
    view = small.arena.view(*extent)
    assert small.first.stat().st_mode & 0o777 == 0o700
    assert Path(small.arena.paths[0]).stat().st_mode & 0o777 == 0o600
    small.arena.close()
    assert not small.first.exists()
    assert not small.second.exists()
    view[:] = 3  # still mapped: no bus error, no fault
    assert view.sum() == 3 * MIB
    small.arena.close()


LEAVE_BEHIND = """
import os, sys
from pathlib import Path
from frogzmq.store.arena import Arena
arena = Arena(Path(sys.argv[1]), fallback=Path(sys.argv[2]), warn=print)
arena.lease("rank", 1 << 20)
print(arena.paths[0], flush=True)
assert "torch" not in sys.modules
os._exit(9)
"""


def test_what_a_dead_peer_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    done = subprocess.run(
        [sys.executable, "-c", LEAVE_BEHIND, first, second],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 9, done.stderr
    left = Path(done.stdout.strip())
    assert left.exists()
    (second / "arena.4").write_bytes(b"x")
    other = first / "something-else"
    other.write_text("not ours")
    setup = Setup(tmp_path)
    assert not left.exists()
    assert not (second / "arena.4").exists()
    assert other.exists()
    setup.arena.close()


def test_two_living_arenas_do_not_share_a_directory(small: Setup, tmp_path: Path) -> None:
    extent = small.arena.lease("a", 10)
    with pytest.raises(DuplicateIdentity, match="another living peer"):
        Arena(small.first, fallback=tmp_path / "third", warn=print)
    assert Path(small.arena.paths[extent.seg]).exists()
    assert not (tmp_path / "third").exists()


def test_a_directory_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir(mode=0o755)
    setup = Setup(tmp_path)
    extent = setup.arena.lease("a", 10)
    assert Path(setup.arena.paths[extent.seg]).parent == setup.second
    assert len(setup.warnings) == 1
    assert "0755" in setup.warnings[0]
    setup.arena.close()


def test_with_no_usable_directory_the_refusal_names_both(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text("a file")
    setup = Setup(tmp_path)
    with pytest.raises(StoreFull, match=r"first.*second"):
        setup.arena.lease("a", 10)
    setup.arena.close()


def test_one_warning_when_the_file_system_says_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that was measured at the start may be gone by the time it is needed."""
    setup = Setup(tmp_path)

    def refuse(fd: int, off: int, size: int) -> None:
        if "first" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        place_module.allocate(fd, off, size)

    monkeypatch.setattr(arena_module, "allocate", refuse)
    extents = [setup.arena.lease("a", MIB) for _ in range(3)]
    assert {Path(setup.arena.paths[e.seg]).parent for e in extents} == {setup.second}
    assert len(setup.warnings) == 1
    assert str(setup.second) in setup.warnings[0]
    assert "--shm-size" in setup.warnings[0]
    setup.arena.close()


def test_the_place_follows_the_runtime_directory(tmp_path: Path) -> None:
    one, two = arena_directory(tmp_path / "a", tmp_path), arena_directory(tmp_path / "b", tmp_path)
    assert one == arena_directory(tmp_path / "a", tmp_path)
    assert one != two
    assert one.parent == tmp_path
    assert str(os.getuid()) in one.name


def test_extents_larger_than_a_segment_get_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "SEGMENT_BYTES", MIB)
    setup = Setup(tmp_path, max_bytes=16 * MIB)
    extents = [setup.arena.lease("a", size) for size in (MIB // 2, 5 * MIB, MIB // 2, MIB)]
    assert [e.seg for e in extents] == [0, 1, 0, 2]
    rank = ArenaMap(setup.arena.paths[:1])  # told of segment 0 only: the others stand beside it
    setup.arena.view(*extents[3])[-1] = 77
    assert rank.view(*extents[3])[-1] == 77
    assert isinstance(extents[0], Extent)
    setup.arena.close()
