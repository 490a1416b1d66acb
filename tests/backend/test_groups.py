"""Groups within the world: who is asked for, in which order, by which numbering, and meshes of them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

pytestmark = pytest.mark.torch
PLACEMENTS = [[0, 0, 0, 0], [0, 1, 0, 1]]


# -------------------------------------------------------------------- C071: made by their members only
def overlapping(rank: int, size: int) -> None:
    """Ten groups that share members, all in use at once; the pairs are made by their members only.

    (torch hashes how many groups a rank has into the names of such groups, so here all have equally many.)
    """
    sets = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2], [0, 1, 2], [1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
    groups = [dist.new_group(ranks, use_local_synchronization=n < 6) for n, ranks in enumerate(sets)]
    works, tensors = [], []
    for turn in range(5):
        for n, (ranks, group) in enumerate(zip(sets, groups, strict=True)):
            if rank not in ranks:
                assert group in (None, dist.GroupMember.NON_GROUP_MEMBER)
                continue
            tensor = torch.full((1000,), float(10 * n + rank + turn))
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
            tensors.append((tensor, sum(10 * n + r + turn for r in ranks)))
    for work in reversed(works):
        work.wait()
    for tensor, want in tensors:
        assert (tensor == want).all()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_c071_ten_overlapping_groups(pool: Pool, placement: list[int]) -> None:
    pool.run(overlapping, placement)


def swapped(rank: int, size: int, wanted: list[list[int]]) -> tuple[float, str]:
    """Rank 3 makes its two groups in the other order, and waits for an hour if need be."""
    begin, text = time.monotonic(), ""
    long = timedelta(hours=1)
    try:
        groups = [dist.new_group(ranks, timeout=long) for ranks in (wanted[::-1] if rank == 3 else wanted)]
        mine = next(group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER)
        dist.all_reduce(torch.ones(2), group=mine)
    except dist.DistBackendError as error:
        text = str(error)
    return time.monotonic() - begin, text


def test_c071_another_order_is_an_error_that_says_what_each_asked_for(pool: Pool) -> None:
    values = pool.run(swapped, [0, 1, 0, 1], [[0, 1], [2, 3]])
    assert all(seconds < 30 for seconds, _ in values)
    assert [text for _, text in values[:2]] == ["", ""]
    for me, other, text in ((2, 3, values[2][1]), (3, 2, values[3][1])):
        assert f"different orders: rank {me} waits in group" in text
        assert f"for rank {other}, which waits in group" in text
        assert "of ranks [2, 3] for rank " in text


# -------------------------------------------------------------------- C073: global and group ranks
def rooted(rank: int, size: int) -> None:
    for wanted in ([1, 3], [3, 1]):
        group = dist.new_group(wanted)  # torch sorts them: group rank 0 is global rank 1
        if rank not in wanted:
            continue
        members = dist.get_process_group_ranks(group)
        assert members == [1, 3]
        for root, group_root in ((members[1], 1), (members[0], 0)):
            for number in ({"global": root}, {"local": group_root}):
                every_rooted_call(rank, group, members, root, number)


def every_rooted_call(rank: int, group, members: list[int], root: int, number: dict[str, int]) -> None:
    where = "global" if "global" in number else "local"

    def at(name: str, chosen: int = root) -> dict[str, int]:
        if where == "global":
            return {name: chosen}
        return {f"group_{name}": members.index(chosen)}

    other = next(r for r in members if r != root)
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, group=group, **at("src"))
    assert tensor.item() == root
    tensor = torch.tensor([float(rank)])
    dist.reduce(tensor, group=group, **at("dst"))
    assert tensor.item() == (sum(members) if rank == root else rank)
    outs = [torch.zeros(1) for _ in members] if rank == root else None
    dist.gather(torch.tensor([float(rank)]), outs, group=group, **at("dst"))
    assert outs is None or [int(t) for t in outs] == members
    dist.scatter(tensor, [torch.tensor([10.0 * r]) for r in members] if rank == root else None,
                 group=group, **at("src"))  # fmt: skip
    assert tensor.item() == 10 * rank
    objects: list[object] = [rank, "of", rank]
    dist.broadcast_object_list(objects, group=group, **at("src"))
    assert objects == [root, "of", root]
    got: list[object] | None = [None] * len(members) if rank == root else None
    dist.gather_object(f"from {rank}", got, group=group, **at("dst"))
    assert got is None or got == [f"from {r}" for r in members]
    one: list[object] = [None]
    dist.scatter_object_list(one, [f"to {r}" for r in members] if rank == root else None, group=group,
                             **at("src"))  # fmt: skip
    assert one == [f"to {rank}"]
    if rank == root:
        dist.send(torch.tensor([7.0]), group=group, **at("dst", other))
        dist.send_object_list(["seven"], group=group, **at("dst", other))
        assert dist.recv(tensor, group=group) == other  # from any source: a global rank
    else:
        assert dist.recv(tensor, group=group, **at("src")) == root
        assert tensor.item() == 7
        dist.recv_object_list(one, group=group, **at("src"))
        assert one == ["seven"]
        dist.send(tensor, group=group, **at("dst"))
    dist.barrier(group=group)


def not_a_member(rank: int, size: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        with pytest.raises(ValueError, match="not part of group"):
            dist.broadcast(torch.zeros(1), src=0, group=group)
        with pytest.raises(RuntimeError, match="invalid root rank 2"):
            dist.broadcast(torch.zeros(1), group_src=2, group=group)
        dist.barrier(group=group)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("what", [rooted, not_a_member])
def test_c073_both_numberings_of_every_rooted_call(pool: Pool, what, placement: list[int]) -> None:
    pool.run(what, placement)


# -------------------------------------------------------------------- meshes, splits, endings
def meshes(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name, want in (("inner", [0, 1] if rank < 2 else [2, 3]), ("outer", [rank % 2, rank % 2 + 2])):
        group = mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == want
        assert dist.get_backend(group) == "frogzmq"
        tensor = torch.tensor([2.0**rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(2.0**r for r in want)
    flat = mesh["outer", "inner"]._flatten("both")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=flat.get_group())
    assert tensor.item() == 4


def subgroups(rank: int, size: int) -> None:
    mine, every = dist.new_subgroups(2)
    assert len(every) == 2
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (1 if rank < 2 else 5)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == 6


def ended_in_any_order(rank: int, size: int) -> None:
    groups = [dist.new_group(timeout=timedelta(seconds=20 + n)) for n in range(4)]
    tensor = torch.ones(100_000)
    works = [dist.all_reduce(tensor.clone(), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()
    order = [2, 0, 3, 1] if rank % 2 else [1, 3, 0, 2]
    for index in order:
        dist.destroy_process_group(groups[index])
    dist.all_reduce(tensor)
    assert tensor[0] == size
    last = dist.new_group()
    dist.all_reduce(tensor, group=last)
    last.abort()
    last.abort()
    last.shutdown()
    with pytest.raises(RuntimeError):
        dist.all_reduce(tensor, group=last)
    dist.barrier()


@pytest.mark.parametrize("what", [meshes, subgroups, ended_in_any_order])
def test_groups_of_the_world(pool: Pool, what) -> None:
    pool.run(what, [0, 1, 1, 0])
