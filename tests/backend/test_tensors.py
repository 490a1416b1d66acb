"""Tensors as they come: strides, emptiness, bools, small integers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

from frogzmq.backend.tensors import as_bytes

pytestmark = pytest.mark.torch
R = dist.ReduceOp
PLACEMENTS = [[0, 0, 0], [0, 1, 0], [0, 1, 2]]
N = 6


def grid(rank: int, rows: int = N, columns: int = N) -> torch.Tensor:
    """All elements differ, within a rank and between ranks."""
    return torch.arange(float(rows * columns)).reshape(rows, columns) * 10 + rank


VIEWS = {
    "column": lambda t: t[:, 2],
    "transpose": lambda t: t.t(),
    "every second": lambda t: t.reshape(-1)[::2],
    "narrow": lambda t: t.narrow(1, 1, 3),
    "every second of both": lambda t: t[1::2, ::3],
    "three axes turned": lambda t: t.reshape(2, 3, -1).permute(2, 0, 1),
    "one row": lambda t: t[:1].t(),
    "channels last": lambda t: t.reshape(1, 2, 3, -1).to(memory_format=torch.channels_last),
}


# ------------------------------------------------------------------------- C056: strides
def strided(rank: int, size: int, rows: int, columns: int) -> None:
    ranks = range(size)
    for name, view in VIEWS.items():
        parts = [view(grid(r, rows, columns)) for r in ranks]
        total = sum(parts)

        def mine(view=view) -> tuple[torch.Tensor, torch.Tensor]:
            """The view and what it looks at; odd ranks have the same shape in other strides."""
            whole = grid(rank, rows, columns)
            return (
                (whole, view(whole)) if rank % 2 == 0 else (whole, view(whole.clone()).contiguous().clone())
            )

        def untouched(whole, part, want, name=name, view=view) -> None:
            assert torch.equal(part, want), name
            if rank % 2 == 0 and part.data_ptr() == view(whole).data_ptr():
                rest = grid(rank, rows, columns)
                view(rest).copy_(want)
                assert torch.equal(whole, rest), f"{name}: wrote outside the view"

        whole, part = mine()
        strides = part.stride()
        dist.all_reduce(part)
        assert part.stride() == strides
        untouched(whole, part, total)
        whole, part = mine()
        dist.broadcast(part, 1)
        untouched(whole, part, parts[1])
        whole, part = mine()
        dist.reduce(part, size - 1, R.MAX)
        untouched(whole, part, parts[-1] if rank == size - 1 else parts[rank])
        whole, part = mine()
        wholes = [torch.zeros(rows, columns) for _ in ranks]
        outs = [view(w) if (r + rank) % 2 else torch.zeros_like(total) for r, w in enumerate(wholes)]
        dist.all_gather(outs, part)
        assert all(torch.equal(out, want) for out, want in zip(outs, parts, strict=True)), name
        whole, part = mine()
        flat = torch.zeros(size * part.numel())
        dist.all_gather_into_tensor(flat, part)
        assert torch.equal(flat, torch.cat([p.reshape(-1) for p in parts])), name
        whole, part = mine()
        other = grid(rank).t()
        dist.all_reduce_coalesced([part, other])
        untouched(whole, part, total)
        assert torch.equal(other, sum(grid(r).t() for r in ranks)), name


def expanded(rank: int, size: int) -> None:
    ranks = range(size)
    given = torch.full((3, 1), float(rank)).expand(3, 4)
    outs = [torch.zeros(3, 4) for _ in ranks]
    dist.all_gather(outs, given)
    assert all((out == r).all() for r, out in enumerate(outs))
    flat = torch.zeros(size * 12)
    dist.all_gather_into_tensor(flat, given)
    assert torch.equal(flat, torch.arange(size).float().repeat_interleave(12))
    # A tensor that is only read may be expanded: the root of a broadcast, all but the root of a reduce.
    t = torch.tensor([7.0]).expand(5) if rank == 0 else torch.zeros(5)
    dist.broadcast(t, 0)
    assert t.tolist() == [7.0] * 5
    t = torch.zeros(5) if rank == 0 else torch.ones(1).expand(5)
    dist.reduce(t, 0)
    assert t.tolist() == ([size - 1.0] * 5 if rank == 0 else [1.0] * 5)
    before = torch.ones(3, 1)
    overlapping = torch.zeros(4).as_strided((3, 2), (1, 1))
    for call in (
        lambda: dist.all_reduce(before.expand(3, 2)),
        lambda: dist.all_reduce_coalesced([torch.zeros(2), before.expand(3, 2)]),
        lambda: dist.broadcast(before.expand(3, 2), (rank + 1) % size),
        lambda: dist.reduce(before.expand(3, 2), rank),
        lambda: dist.all_gather([torch.zeros(1).expand(4) for _ in ranks], torch.ones(4)),
        lambda: dist.all_gather_into_tensor(torch.zeros(1).expand(4 * size), torch.ones(4)),
        lambda: dist.all_reduce(overlapping),
    ):
        with pytest.raises(dist.DistBackendError, match=r"memory|contiguous"):
            call()
    assert before.tolist() == [[1.0]] * 3
    assert not overlapping.any()
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_c056_results_stand_in_the_strides_of_the_given_tensor(pool: Pool, placement: list[int]) -> None:
    pool.run(strided, placement, N, N)


def test_c056_large_ones_too(pool: Pool) -> None:
    pool.run(strided, [0, 1, 0], N, 30_000)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_c056_expanded_is_read_but_never_written(pool: Pool, placement: list[int]) -> None:
    pool.run(expanded, placement)


# --------------------------------------------------------------------------- C058: empty
def empty(rank: int, size: int, shape: tuple[int, ...]) -> None:
    ranks = range(size)

    def normal() -> None:
        t = torch.full((3, 5), float(rank + 1))
        dist.all_reduce(t)
        assert (t == sum(r + 1 for r in ranks)).all()

    def nothing() -> torch.Tensor:
        return torch.empty(shape)

    lists = [nothing() for _ in ranks]
    flat = torch.empty((size * shape[0], *shape[1:]))
    t = nothing()
    calls = {
        "all_reduce": lambda: dist.all_reduce(t, async_op=True),
        "avg": lambda: dist.all_reduce(t, R.AVG, async_op=True),
        "coalesced": lambda: dist.all_reduce_coalesced([t, nothing()], async_op=True),
        "broadcast": lambda: dist.broadcast(t, 1, async_op=True),
        "reduce": lambda: dist.reduce(t, 1, async_op=True),
        "all_gather": lambda: dist.all_gather(lists, t, async_op=True),
        "into": lambda: dist.all_gather_into_tensor(flat, t, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }
    for call in calls.values():
        number = dist.group.WORLD._get_sequence_number_for_group()
        normal()
        work = call()
        normal()
        work.wait()
        assert (
            dist.group.WORLD._get_sequence_number_for_group() == number + 3
        )  # it has its place in the order
    assert t.shape == shape
    assert [out.shape for out in lists] == [torch.Size(shape)] * size
    assert flat.shape == (size * shape[0], *shape[1:])
    t = torch.zeros(3)  # an empty one among others
    dist.all_reduce_coalesced([nothing(), t.add_(rank)])
    assert t.tolist() == [float(sum(ranks))] * 3


@pytest.mark.parametrize("shape", [(0,), (1, 0, 2)])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_c058_empty_tensors_keep_their_place_and_shape(
    pool: Pool, placement: list[int], shape: tuple[int, ...]
) -> None:
    pool.run(empty, placement, shape)


# ---------------------------------------------------------------------------- C060: bool
def masks(rank: int, size: int) -> None:
    ranks = range(size)

    def mask(r: int, n: int = 50_000) -> torch.Tensor:
        return torch.arange(n) % (r + 2) == 0

    stack = torch.stack([mask(r) for r in ranks])
    odd = stack.sum(0) % 2 == 1
    want = {
        R.SUM: stack.any(0), R.MAX: stack.any(0), R.BOR: stack.any(0),
        R.PRODUCT: stack.all(0), R.MIN: stack.all(0), R.BAND: stack.all(0), R.BXOR: odd,
    }  # fmt: skip
    for op, result in want.items():
        t = mask(rank)
        dist.all_reduce(t, op)
        assert torch.equal(t, result), op
        assert int(t.view(torch.uint8).max()) <= 1, op
        t = mask(rank)
        dist.reduce(t, 1, op)
        assert torch.equal(t, result if rank == 1 else mask(rank)), op
    # numpy and C may leave other non-zero bytes behind a True
    t = (mask(rank).view(torch.uint8) * 7).view(torch.bool)
    dist.all_reduce(t)
    assert torch.equal(t, stack.any(0))
    t = mask(rank)
    dist.broadcast(t, 2)
    assert torch.equal(t, mask(2))
    outs = [torch.zeros(50_000, dtype=torch.bool) for _ in ranks]
    dist.all_gather(outs, mask(rank))
    assert torch.equal(torch.stack(outs), stack)
    with pytest.raises(TypeError, match=r"all_reduce: AVG is not supported for bool"):
        dist.all_reduce(mask(rank), R.AVG)
    with pytest.raises(dist.DistBackendError, match="bool"):
        dist.reduce(mask(rank), 0, R.AVG)
    model = torch.nn.Linear(2, 1)
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(torch.ones(1, 2)).sum().backward()
    assert model.mask.tolist() == [True, True]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_c060_bools_fold_as_logic_and_move_as_bytes(pool: Pool, placement: list[int]) -> None:
    pool.run(masks, placement)


# ------------------------------------------------------------------------- C062: wrapping
def overflow(rank: int, size: int) -> None:
    pair = dist.new_group([0, 1])
    triples = {
        torch.uint8: (200, 100, 100),
        torch.int8: (120, 100, 100),
        torch.int16: (30_000, 20_000, 32_767),
    }
    triples[torch.int32] = (2_000_000_000, 2_000_000_000, -5)
    triples[torch.int64] = (2**63 - 1, 2, 2**62)
    for dtype, given in triples.items():
        for n in (1, 20_000):
            locally = [torch.full((n,), number, dtype=dtype) for number in given]
            if rank < 2:
                t = locally[rank].clone()
                dist.all_reduce(t, group=pair)
                assert torch.equal(t, locally[0] + locally[1]), dtype
                if dtype == torch.uint8:
                    assert t[0] == 44
                if dtype == torch.int8:
                    assert t[0] == -36
            t = locally[rank].clone()
            dist.all_reduce(t)
            assert torch.equal(t, locally[0] + locally[1] + locally[2]), dtype
            t = locally[rank].clone()
            dist.all_reduce(t, R.PRODUCT)
            assert torch.equal(t, locally[0] * locally[1] * locally[2]), dtype
    for dtype in (*triples, torch.uint16, torch.uint32, torch.uint64):
        # The rule: integers have no AVG. Convert to a float type, or use SUM and divide.
        with pytest.raises(TypeError, match=rf"AVG is not supported for {str(dtype)[6:]}.*SUM and divide"):
            dist.all_reduce(torch.ones(3, dtype=dtype), R.AVG)
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_c062_small_integers_wrap_as_torch_does(pool: Pool, placement: list[int]) -> None:
    pool.run(overflow, placement)


# ----------------------------------------------------------------- views, factors, refusals
def views(rank: int, size: int) -> None:
    ranks = range(size)

    def number(r: int) -> torch.Tensor:
        return torch.complex(torch.arange(6.0) + r, torch.full((6,), r + 1.0))

    for lazy in (torch.conj, lambda t: torch.conj(t)[::2]):
        # torch's own functions refuse conjugate views (view_as_real); other callers hand them to the group.
        t = lazy(number(rank))
        assert t.is_conj()
        dist.group.WORLD.allreduce(t).wait()
        assert torch.equal(t, sum(lazy(number(r)) for r in ranks))
        t = lazy(number(rank))
        dist.group.WORLD.broadcast(t, 1).wait()
        assert torch.equal(t, lazy(number(1)))
    negative = number(rank).conj().imag
    assert negative.is_neg()
    dist.all_reduce(negative)
    assert negative.tolist() == [-float(sum(r + 1 for r in ranks))] * 6
    leaf = torch.full((4, 3), rank + 1.0, requires_grad=True)
    for part in (leaf.t(), leaf):
        dist.all_reduce(part.detach() if part is leaf else part)
    assert leaf.requires_grad
    assert leaf.is_leaf
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(parameter, 1)
    assert parameter.tolist() == [1.0] * 3
    with torch.inference_mode():
        inferred = torch.full((2, 3), float(rank))
    dist.all_reduce(inferred.t())
    assert inferred.tolist() == [[float(sum(ranks))] * 3] * 2
    scalar = torch.tensor(rank + 1, dtype=torch.int16)
    dist.all_reduce(scalar, R.PRODUCT)
    assert scalar.shape == ()
    assert scalar.item() == 6
    # Types that torch cannot copy between strides.
    whole = torch.full((4, 2), rank, dtype=torch.uint8)
    dist.broadcast(whole.view(torch.int4)[:, 0], 2)
    assert whole[:, 0].tolist() == [2] * 4
    assert whole[:, 1].tolist() == [rank] * 4
    wide = torch.full((4, 2), rank, dtype=torch.int16)
    dist.broadcast(wide.view(torch.bits16).t(), 2)
    assert wide.tolist() == [[2, 2]] * 4


def factors(rank: int, size: int) -> None:
    scale = [0.3, 1.7, -2.25]

    def given(r: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.linspace(-3, 3, 999) * (r + 1)).to(dtype)

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        # The factor rounded to the dtype, each product too, and the sum folded like any other.
        want = given(rank, dtype) * torch.tensor([scale[rank]], dtype=dtype)
        dist.all_reduce(want)
        t = given(rank, dtype)
        dist.all_reduce(t, dist._make_nccl_premul_sum(scale[rank]))
        assert torch.equal(t, want), dtype
        t = given(rank, dtype)
        dist.all_reduce(t, dist._make_nccl_premul_sum(torch.tensor([scale[rank]], dtype=dtype)))
        assert torch.equal(t, want), dtype
        t, other = given(rank, dtype), given(rank, dtype)[::3]
        dist.all_reduce_coalesced([t, other], dist._make_nccl_premul_sum(scale[rank]))
        assert torch.equal(t, want), dtype
        assert torch.equal(other, want[::3]), dtype
        t = given(rank, dtype)
        dist.reduce(t, 1, dist._make_nccl_premul_sum(scale[rank]))
        assert torch.equal(t, want if rank == 1 else given(rank, dtype)), dtype
    t = torch.ones(3, dtype=torch.complex64) * (1 + 2j)
    dist.all_reduce(t, dist._make_nccl_premul_sum(0.5))
    assert t.tolist() == [1.5 + 3j] * 3
    with pytest.raises(TypeError, match=r"PREMUL_SUM is not supported for int64.*multiply it yourself"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), dist._make_nccl_premul_sum(2.0))


def refusals(rank: int, size: int) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    for text, tensor in {
        "nested tensors": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested tensors are not": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "sparse_csr tensors": torch.eye(3).to_sparse_csr(),
        "on meta": torch.empty(3, device="meta"),
        "quantised tensors .*qint8.*int_repr": quantised,
    }.items():
        for call in (
            lambda tensor=tensor: dist.broadcast(tensor, 0),
            lambda tensor=tensor: dist.all_reduce(tensor),
            lambda tensor=tensor: dist.reduce(tensor, 0),
        ):
            with pytest.raises(TypeError, match=text):
                call()
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_conjugate_negative_leaf_and_inference_tensors_are_written_as_what_they_are(
    pool: Pool, placement: list[int]
) -> None:
    pool.run(views, placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_rank_multiplies_by_its_own_factor(pool: Pool, placement: list[int]) -> None:
    pool.run(factors, placement)


def test_what_is_not_dense_bytes_is_refused_by_name(pool: Pool) -> None:
    pool.run(refusals, [0, 1, 0])


def test_lending_memory_leaves_a_storage_resizable():
    tensor = torch.arange(4.0)
    view = as_bytes(tensor)
    assert view.tobytes() == torch.arange(4.0).numpy().tobytes()
    view[:4] = 255
    assert torch.isnan(tensor[0])
    tensor.untyped_storage().resize_(0)  # FSDP frees its parameters so
