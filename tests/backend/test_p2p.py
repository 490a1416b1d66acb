"""send, recv and their relatives through ``torch.distributed``: on one machine and on two."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

pytestmark = pytest.mark.torch
PLACEMENTS = {"one machine": [0, 0, 0, 0], "two machines": [0, 0, 1, 1]}
places = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
pairs = pytest.mark.parametrize("placement", [[0, 0], [0, 1]], ids=PLACEMENTS.keys())


def sizes(rank: int, size: int) -> None:
    other = 1 - rank
    for numel in (0, 1, 1000, 8192, 8193, 100_000, 16 << 20):
        want = torch.arange(numel, dtype=torch.float32)
        if rank == 0:
            dist.send(want, 1, tag=numel % 97)
            got = torch.full((numel,), -1.0)
            assert dist.recv(got, 1) == 1
            assert torch.equal(got, want + 1)
        else:
            got = torch.full((numel,), -1.0)
            assert dist.recv(got, other, tag=numel % 97) == 0
            assert torch.equal(got, want)
            dist.send(got + 1, other)


@pairs
def test_four_bytes_to_64_mib_there_and_back(pool: Pool, placement: list[int]) -> None:
    pool.run(sizes, placement)


def kinds(rank: int, size: int) -> None:
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    names += ["complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]
    for number, name in enumerate(names):
        dtype = getattr(torch, name)
        want = (torch.arange(12).reshape(3, 4) % 7).to(dtype)
        if rank == 0:
            dist.send(want, 1, tag=number)
            dist.send(want.t(), 1, tag=number)
            dist.send(want.reshape(-1)[0], 1, tag=number)
        else:
            raw = torch.uint8 if name.startswith("float8") else dtype
            got, turned = torch.zeros(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype).t()
            lone = torch.ones((), dtype=dtype)
            for tensor in (got, turned, lone):
                dist.recv(tensor, 0, tag=number)
            assert torch.equal(got.view(raw), want.view(raw))
            assert torch.equal(turned.contiguous().view(raw), want.t().contiguous().view(raw))
            assert lone.view(raw) == want.reshape(-1)[0].view(raw)


@pairs
def test_every_dtype_and_stride(pool: Pool, placement: list[int]) -> None:
    pool.run(kinds, placement)


def c_tags(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(torch.ones(25 << 20), 1, tag=1)  # 100 MB that nobody receives yet
        dist.send(torch.full((1,), 2.0), 1, tag=2)
        generator = torch.Generator().manual_seed(1)
        for number in range(100):
            numel = int(torch.randint(0, 50_000, (1,), generator=generator))
            dist.send(torch.full((numel,), float(number)), 1, tag=3)
    elif rank == 1:
        small, large = torch.zeros(1), torch.zeros(25 << 20)
        dist.recv(small, 0, tag=2)
        assert small == 2
        dist.recv(large, 0, tag=1)
        assert bool((large == 1).all())
        generator = torch.Generator().manual_seed(1)
        for number in range(100):
            numel = int(torch.randint(0, 50_000, (1,), generator=generator))
            got = torch.zeros(numel)
            dist.recv(got, 0, tag=3)
            assert bool((got == number).all())
    dist.barrier()
    if rank == 3:
        seen = []
        for _ in range(6):
            got = torch.zeros(2)
            seen.append(dist.recv(got, tag=9))
            assert got.tolist() == [seen[-1], seen.count(seen[-1])]
        assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    else:
        for number in (1.0, 2.0):
            dist.send(torch.tensor([float(rank), number]), 3, tag=9)


@places
def test_c075_tags_do_not_wait_for_each_other_and_any_source_names_the_sender(
    pool: Pool, placement: list[int]
) -> None:
    pool.run(c_tags, placement)


def rings(rank: int, size: int) -> None:
    left, right = (rank - 1) % size, (rank + 1) % size
    for numel in (1, 300_000):
        out, back = torch.full((numel,), float(rank)), torch.zeros(numel)
        dist.send(out, right)  # all send first
        dist.recv(back, left)
        assert bool((back == left).all())
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, left), dist.P2POp(dist.irecv, back, right)]
        )
        for work in works:
            work.wait()
            assert work.is_completed()
        assert bool((back == right).all())
        # To oneself, posted before it is sent.
        mine = torch.zeros(numel)
        receiving = dist.irecv(mine, rank)
        dist.isend(out, rank).wait()
        receiving.wait()
        assert torch.equal(mine, out)
    futures = [dist.irecv(torch.zeros(2), right).get_future(), dist.isend(torch.ones(2), left).get_future()]
    assert futures[0].wait()[0].tolist() == [1, 1]
    assert futures[1].wait()[0].tolist() == [1, 1]


@places
def test_rings_and_batches(pool: Pool, placement: list[int]) -> None:
    pool.run(rings, placement)


def many(rank: int, size: int) -> None:
    count = 1500
    if rank == 0:
        works = [dist.isend(torch.full((n % 9000,), float(n)), 1, tag=n) for n in range(count)]
        for work in works:
            work.wait()
    else:
        got = [torch.zeros(n % 9000) for n in range(count)]
        dist.recv(got[-1], 0, tag=count - 1)  # the last one first
        works = [dist.irecv(got[n], 0, tag=n) for n in reversed(range(count - 1))]
        for work in works:
            work.wait()
        assert all(bool((tensor == n).all()) for n, tensor in enumerate(got))


@pairs
def test_many_outstanding_in_the_opposite_order(pool: Pool, placement: list[int]) -> None:
    pool.run(many, placement)


def large_ones(rank: int, size: int) -> None:
    count, numel = 6, 16 << 20  # 64 MiB each: more than is given unasked
    if rank == 0:
        works = [dist.isend(torch.full((numel,), float(n)), 1, tag=n) for n in range(count)]
        for work in works:
            work.wait()
    else:
        for n in reversed(range(count)):
            got = torch.zeros(numel)
            dist.recv(got, 0, tag=n)
            assert bool((got == n).all())


@pairs
def test_more_large_messages_than_are_given_unasked(pool: Pool, placement: list[int]) -> None:
    pool.run(large_ones, placement)


def groups(rank: int, size: int) -> None:
    members = [1, 3]
    group = dist.new_group(members)
    if rank in members:
        other = members[1 - members.index(rank)]
        got = torch.zeros(1)
        dist.send(torch.tensor([float(rank)]), other, group=group)
        assert dist.recv(got, other, group=group) == other
        dist.isend(torch.tensor([float(rank)]), group=group, group_dst=members.index(other)).wait()
        assert dist.recv(got, group=group) == other
        assert got.item() == other
    objects: list[object] = [{"from": rank}, "x" * 50_000] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(objects, 2)
    elif rank == 2:
        assert dist.recv_object_list(objects, 0) == 0
        assert objects == [{"from": 0}, "x" * 50_000]


@places
def test_groups_and_objects(pool: Pool, placement: list[int]) -> None:
    pool.run(groups, placement)


def threads(rank: int, size: int) -> None:
    errors: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for number in range(20):
                numel = 1 + number * 1000 * tag
                got = torch.zeros(numel)
                work = dist.irecv(got, 1 - rank, tag=tag)
                dist.send(torch.full((numel,), float(rank + number)), 1 - rank, tag=tag)
                work.wait()
                assert bool((got == 1 - rank + number).all())
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=talk, args=(tag,)) for tag in range(1, 4)]
    for worker in workers:
        worker.start()
    for number in range(30):
        tensor = torch.full((1 + number * 5000,), float(rank))
        dist.all_reduce(tensor)
        assert bool((tensor == 1).all())
    for worker in workers:
        worker.join(60)
    assert not errors, errors


@pairs
def test_threads_beside_collectives(pool: Pool, placement: list[int]) -> None:
    pool.run(threads, placement)


def mismatched(rank: int, size: int, sent: int, dtype: str, received: int) -> list[str]:
    texts, got = [], torch.full((received,), 7.0)
    try:
        if rank == 0:
            dist.send(torch.ones(sent, dtype=getattr(torch, dtype)), 1, tag=4)
            dist.recv(got, 1)
        else:
            dist.recv(got, 0, tag=4)
    except dist.DistBackendError as error:
        texts = [type(error).__name__, str(error)]
    assert bool((got == 7).all()), "outputs are untouched"
    return texts


@pairs
@pytest.mark.parametrize(
    ("sent", "dtype", "received"),
    [(4, "float32", 2), (2, "float32", 4), (4, "int32", 4), (9000, "float32", 1)],
)
def test_another_size_or_dtype_is_an_error_on_both_sides(
    pool: Pool, placement: list[int], sent: int, dtype: str, received: int
) -> None:
    for name, text in pool.run(mismatched, placement, sent, dtype, received):
        assert name == "Mismatch"
        assert f"rank 0 sent {4 * sent} bytes of {dtype}, rank 1 called recv for {4 * received}" in text


def late(rank: int, size: int) -> list[str]:
    if rank == 1:
        time.sleep(1.2)  # longer than the receiver waits at first
        dist.send(torch.ones(1), 0, tag=5)
        dist.send(torch.ones(1), 0, tag=77)
        time.sleep(2.5)
        return []
    work = dist.irecv(torch.zeros(1), 1, tag=5)
    texts = []
    for wait in (
        lambda: work.wait(timedelta(seconds=0.3)),
        work.wait,
        lambda: dist.recv(torch.zeros(1), 1, tag=6),
    ):
        try:
            wait()
            texts.append("done")
        except dist.DistBackendError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


@pairs
def test_a_receive_that_runs_out_of_time_says_what_it_waited_for(pool: Pool, placement: list[int]) -> None:
    (first, second, third), _ = pool.run(late, placement, timeout_s=2.0)
    assert (
        "DeadlineExceeded: Timed out after 0.3 s: timeout while waiting for recv of 4 bytes of float32"
        in first
    )
    assert "with tag 5 from rank 1 (process" in first
    assert second == "done", "a shorter wait leaves the receive going on"
    assert "waiting for recv of 4 bytes of float32 with tag 6 from rank 1 (process" in third
    assert "tag 77 from rank 1 (4 bytes)" in third
    assert " on rank 0; " in third


def leaves_first(rank: int, size: int, numel: int) -> None:
    if rank == 0:
        dist.send(torch.ones(numel), 1)
        return  # and destroys its group
    time.sleep(1.0)
    got = torch.zeros(numel)
    dist.recv(got, 0)
    assert bool((got == 1).all())
    with pytest.raises(dist.DistBackendError, match=r"rank 0 .* has left the group"):
        dist.recv(got, 0)


@pairs
@pytest.mark.parametrize("numel", [1, 1_000_000])
def test_what_was_sent_before_leaving_still_arrives(pool: Pool, placement: list[int], numel: int) -> None:
    pool.run(leaves_first, placement, numel)


def pipeline(rank: int, size: int, kind: str) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind]
    runner = schedule(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    for _ in range(3):
        layers[rank].zero_grad()
        given = {0: [x], size - 1: []}.get(rank, [])
        runner.step(*given, **({"target": y, "losses": []} if rank == size - 1 else {}))
    got = [parameter.grad.clone() for parameter in layers[rank].parameters()]
    for layer in layers:
        layer.zero_grad()
    whole = torch.nn.Sequential(*layers)
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (torch.nn.functional.mse_loss(whole(part), target) / 4).backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in layers[rank].parameters()])


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_pipelining_gives_the_gradients_of_one_process(pool: Pool, kind: str) -> None:
    pool.run(pipeline, [0, 0, 1], kind)


def after_the_end(rank: int, size: int) -> None:
    group = dist.new_group()
    dist.destroy_process_group(group)
    backend = dist.group.WORLD
    with pytest.raises(ValueError, match="Invalid rank|group"):
        dist.send(torch.ones(1), 1 - rank, group=group)
    with pytest.raises(dist.DistBackendError, match="invalid destination rank 7"):
        backend.send([torch.ones(1)], 7, 0)
    with pytest.raises(dist.DistBackendError, match="Tag must be nonnegative"):
        dist.recv(torch.ones(1), 1 - rank, tag=-1)
    with pytest.raises(dist.DistBackendError, match="share memory"):
        dist.recv(torch.ones(1).expand(3), 1 - rank)
    got = torch.zeros(1)
    work = dist.irecv(got, 1 - rank)
    with pytest.raises(dist.DistBackendError, match="before the message has come|no meaning"):
        backend.recv_anysource([torch.zeros(1)], 5)._source_rank()
    dist.send(torch.ones(1), 1 - rank)
    work.wait()
    assert got.item() == 1
    dist.send(torch.ones(1), 1 - rank, tag=5)  # for the one that was posted above
    dist.barrier()


@pairs
def test_wrong_calls_are_refused_and_hurt_nobody(pool: Pool, placement: list[int]) -> None:
    pool.run(after_the_end, placement)
