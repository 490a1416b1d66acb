"""Lists of tensors become one run of bytes: lent where views of one tensor allow it, else copied."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

from frogzmq.backend.scattering import _joined

pytestmark = pytest.mark.torch


def address(data: object) -> int:
    return int(data.__array_interface__["data"][0])  # type: ignore[attr-defined]


def bytes_of(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(bytes(t.contiguous().view(torch.uint8).flatten().tolist()) for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 0, 5], [6]])
def test_neighbours_are_lent(dtype: torch.dtype, counts: list[int]) -> None:
    whole = torch.arange(8).to(dtype)
    views = list(torch.split(whole[1:7], counts))
    lent = _joined(views, torch.empty(2, dtype=dtype))
    assert address(lent) == views[0].data_ptr()
    assert lent.tobytes() == bytes_of(views)


def test_parameters_are_lent_and_kept() -> None:
    views = list(torch.arange(6.0, requires_grad=True).reshape(3, 2).unbind())
    expected, lent = bytes_of([view.detach() for view in views]), _joined(views, torch.empty(2))
    del views
    assert lent.tobytes() == expected


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: [x[2:4], x[0:2], x[4:6]],  # out of order
        lambda x: [x[0:2], x[3:5], x[6:8]],  # gaps
        lambda x: [x[0:2], x[0:2], x[2:4]],  # one twice
        lambda x: [x[0:4:2], x[4:8:2]],  # strides
        lambda x: [x[0:2], x[2:4].clone()],  # another storage
        lambda x: [x[:0], x[0:2], x[2:4]],
        lambda x: [x[0:4].to(torch.complex64).conj()[:2], x[0:2].to(torch.complex64)],
    ],
)
def test_others_are_copied(pick: object) -> None:
    whole = torch.arange(8.0)
    tensors = pick(whole)  # type: ignore[operator]
    joined = _joined(tensors, torch.empty(2))
    assert joined.tobytes() == bytes_of([t.resolve_conj() for t in tensors])
    assert address(joined) not in {t.data_ptr() for t in tensors}


def test_an_output_among_the_inputs_means_a_copy() -> None:
    whole = torch.arange(6.0)
    views = list(whole.chunk(3))
    expected = bytes_of(views)
    joined = _joined(views, views[2])
    views[2].zero_()
    assert joined.tobytes() == expected
    # The same memory under another storage.
    other = torch.from_numpy(whole.numpy()[1:])
    assert address(_joined(views, other)) != whole.data_ptr()


def in_place(rank: int, size: int) -> None:
    """The output is the input, or lies elsewhere in it, and a future lets another thread write it early."""
    n = 400_000
    whole = [torch.arange(size * n) + 10_000_000 * r for r in range(size)]
    want = torch.cat([whole[s].chunk(size)[rank] for s in range(size)])
    for splits in (None, [n] * size):
        mine = whole[rank].clone()
        work = dist.all_to_all_single(mine, mine, splits, splits, async_op=True)
        work.get_future()
        work.wait()
        assert torch.equal(mine, want)
    mine = whole[rank].clone()
    slot = (rank + 1) % size  # not where this rank's own slice stands
    out = mine[slot * n : (slot + 1) * n]
    work = dist.reduce_scatter_tensor(out, mine, async_op=True)
    work.get_future()
    work.wait()
    assert torch.equal(out, sum(w[rank * n : (rank + 1) * n] for w in whole))
    for place in (rank, slot):  # where it is gathered to, and where another rank's is
        room = torch.zeros(size * n, dtype=torch.int64)
        part = room[place * n : (place + 1) * n]
        part.copy_(whole[rank][:n])
        work = dist.all_gather_into_tensor(room, part, async_op=True)
        work.get_future()
        work.wait()
        assert torch.equal(room, torch.cat([w[:n] for w in whole]))


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 1]], ids=str)
def test_an_output_within_the_input_gives_the_right_numbers(pool: Pool, placement: list[int]):
    pool.run(in_place, placement)
