"""float8: every code, every tie, and random floats, against torch's own conversions."""

from __future__ import annotations

import numpy as np
import pytest

from frogzmq.fold import halves, quarters

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
FORMATS = sorted(quarters.FORMATS)
CODES = np.arange(256, dtype=np.uint8)


def widen(name: str, codes: np.ndarray) -> np.ndarray:
    out = np.empty(codes.size, np.float32)
    quarters.converters(name)[0](codes, out, halves.Scratch(codes.size))
    return out


def narrow(name: str, values: np.ndarray) -> np.ndarray:
    out = np.empty(values.size, np.uint8)
    quarters.converters(name)[1](values.copy(), out, halves.Scratch(values.size))
    return out


def torch_values(name: str, codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(codes).view(getattr(torch, name)).float().numpy()


def torch_codes(name: str, values: np.ndarray) -> np.ndarray:
    """torch's codes, its NaNs made positive."""
    codes = torch.from_numpy(values).to(getattr(torch, name)).view(torch.uint8).numpy()
    nan = np.uint8(quarters.FORMATS[name].nan)
    return np.where(np.isnan(torch_values(name, codes)), nan, codes)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_has_torchs_value(name: str) -> None:
    ours, theirs = widen(name, CODES), torch_values(name, CODES)
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(theirs[~np.isnan(theirs)]))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_comes_back(name: str) -> None:
    nan = np.isnan(torch_values(name, CODES))
    assert np.array_equal(narrow(name, widen(name, CODES)), np.where(nan, quarters.FORMATS[name].nan, CODES))


@pytest.mark.parametrize("name", FORMATS)
def test_every_tie_and_its_neighbours_round_as_torch_does(name: str) -> None:
    finite = np.unique(widen(name, CODES)[np.isfinite(widen(name, CODES))]).astype(np.float64)
    step = finite[-1] - finite[-2]
    finite = np.concatenate([[finite[0] - step], finite, [finite[-1] + step]])  # up to what overflows
    exact = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    bits = exact.view(np.uint32)
    values = np.concatenate([bits, bits - np.uint32(1), bits + np.uint32(1)]).view(np.float32)
    assert np.array_equal(narrow(name, values), torch_codes(name, values))


@pytest.mark.parametrize("name", FORMATS)
def test_any_float_rounds_as_torch_does(name: str) -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = np.random.default_rng(5).integers(0, 1 << 16, 1 << 16, dtype=np.uint32)
    for bits in (upper, upper | np.uint32(1), upper | lower):
        values = bits.view(np.float32)
        assert np.array_equal(narrow(name, values), torch_codes(name, values))
