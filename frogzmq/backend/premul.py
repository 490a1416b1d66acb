"""PREMUL_SUM: a sum of contributions, each multiplied by its own rank's factor.

The rank multiplies before it gives the bytes, as NCCL does: a factor is the rank's own business, other
ranks may have others, and the fabric folds a plain sum. The factor is rounded to the tensor's dtype and so is
the product, once; then the sum is folded as any SUM of that dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from frogzmq.backend.errors import BadTensor


def premultiplied(tensor: torch.Tensor, opts: Any, what: str) -> torch.Tensor:
    """A new tensor: this one times the factor that the options (or the ``ReduceOp``) carry."""
    factor = _factor_of(getattr(opts, "reduceOp", opts), what)
    tensor = tensor.detach()
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not isinstance(factor, torch.Tensor):
        factor = torch.tensor(factor, dtype=torch.float64)
    scale = factor.detach().reshape(()).to(tensor.device, parts.dtype)
    if parts.dtype in (torch.float32, torch.float64):
        product = parts * scale
    else:
        # Both are narrow enough for float32 to hold the product exactly; torch cannot multiply float8.
        product = (parts.float() * scale.float()).to(parts.dtype)
    return torch.view_as_complex(product) if tensor.is_complex() else product


def _factor_of(op: Any, what: str) -> float | torch.Tensor:
    try:
        factor: float | torch.Tensor = op.factor
    except (AttributeError, RuntimeError):
        raise BadTensor(
            f"{what}: PREMUL_SUM without a factor; make the op by "
            "torch.distributed._make_nccl_premul_sum(factor)"
        ) from None
    if isinstance(factor, torch.Tensor) and (factor.numel() != 1 or factor.is_complex()):
        raise BadTensor(
            f"{what}: the factor of PREMUL_SUM must be one real number, got a tensor of shape "
            f"{tuple(factor.shape)} and {factor.dtype}"
        )
    return factor
