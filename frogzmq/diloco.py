"""DiLoCo: many local steps, then one exchange of how far everybody came.

Each rank trains on its own for ``every`` inner steps. Then the mean over the ranks of (anchor - parameters),
the outer gradient, moves the anchor by Nesterov momentum, and everybody goes on from there (Douillard et
al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105). It sends
``every`` times fewer bytes than DDP and does not compute the same thing.

::

    outer = DiLoCo(model, every=50)
    for batch in data:
        loss(model, batch).backward()
        inner.step(); inner.zero_grad()
        outer.step()
    outer.finish()

With ``overlap`` the exchange runs beside the next round's inner steps and is applied one round late: what
a rank did meanwhile is kept on top (as in Streaming DiLoCo, arXiv 2501.18512, with one fragment).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from frogzmq.hooks.report import Report


class DiLoCo:
    """Outer optimisation of ``model`` over ``group`` (default: all ranks).

    Construction is a collective call: every rank starts from the first rank's parameters and buffers. Do not
    wrap the model in DDP. ``every``: inner steps per round, the same on all ranks. Only parameters that
    require gradients are exchanged. Outer arithmetic is in float32 at least.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        overlap: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if every < 1 or outer_lr <= 0 or not 0 <= outer_momentum < 1:
            raise ValueError(
                "DiLoCo needs every >= 1, outer_lr > 0 and 0 <= outer_momentum < 1, not "
                f"{every}, {outer_lr} and {outer_momentum}"
            )
        self.model, self.every, self.overlap = model, every, overlap
        self.lr, self.momentum, self.nesterov = outer_lr, outer_momentum, nesterov
        self.group = group
        self.size = dist.get_world_size(group)
        self.report = Report()
        self.inner_steps = 0
        first = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)[0]
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, first, group=group)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError("DiLoCo: the model has no parameter that requires gradients")
        self._anchor = self._flat(p.detach() for p in self._parameters)
        self._velocity = torch.zeros_like(self._anchor)
        self._pending: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    def step(self) -> bool:
        """Count one inner step; at the end of a round, exchange. Whether parameters were moved by it."""
        self.inner_steps += 1
        if self.inner_steps % self.every:
            return False
        moved = self._land()
        self._launch()
        return moved if self.overlap else self._land()

    def finish(self) -> None:
        """End the last round, whole or not, so that all ranks hold the same parameters. Collective."""
        self._land()
        self._launch()
        self._land()

    # ------------------------------------------------------------------- a round
    def _launch(self) -> None:
        here = self._flat(p.detach() for p in self._parameters)
        gradient = self._anchor - here
        work = dist.all_reduce(gradient, group=self.group, async_op=True)
        assert work is not None
        self._pending = (work, gradient, here)

    def _land(self) -> bool:
        """Apply the exchange that is on its way, if there is one."""
        if self._pending is None:
            return False
        work, gradient, left_from = self._pending
        self._pending = None
        work.wait()
        gradient.div_(self.size)
        self._velocity.mul_(self.momentum).add_(gradient)
        move = gradient.add(self._velocity, alpha=self.momentum) if self.nesterov else self._velocity
        self._anchor.add_(move, alpha=-self.lr)
        now = self._flat(p.detach() for p in self._parameters)
        # What happened since the exchange began (nothing, unless it overlaps) stays on top.
        self._unflat(self._anchor + (now - left_from))
        self.report.add(self.size, 0)
        return True

    @staticmethod
    def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        wide = [t.reshape(-1).to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
        return torch.cat(wide)

    def _unflat(self, flat: torch.Tensor) -> None:
        at = 0
        with torch.no_grad():
            for parameter in self._parameters:
                part = flat[at : at + parameter.numel()]
                parameter.copy_(part.view_as(parameter))
                at += parameter.numel()
