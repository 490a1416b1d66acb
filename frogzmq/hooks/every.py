"""``every_k``: gather gradients for k steps, then exchange them once.

Meaning: on k - 1 steps of k the gradients that DDP hands to the optimizer are zero on every rank, and nothing
is sent. On the k-th they are the mean over all ranks and over the k steps. With an optimizer that steps only
then (``EveryKState.step`` sees to it), that is a step with a batch k times as large.
"""

# No postponed annotations: DDP compares those of a hook with its classes.
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from frogzmq.hooks.report import Report


class EveryKState:
    """State of ``every_k`` for one model: ``ddp.register_comm_hook(EveryKState(k=8), every_k)``.

    ``group``: the ranks that exchange (default: all). Parameters stay equal on all ranks at every step.
    """

    def __init__(self, k: int, group: dist.ProcessGroup | None = None) -> None:
        if k < 1:
            raise ValueError(f"every_k needs k of at least 1, not {k}")
        self.k = k
        self.group = group
        self.report = Report()
        self.exchanged = False
        """Whether the last backward pass ended with an exchange."""
        self._passes = 0
        self._used = self._skipped = 0
        # By parameter: DDP cuts its buckets anew after the first pass.
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """``optimizer.step()`` if gradients were exchanged; whether it was.

        A step on zero gradients would still move parameters by momentum and weight decay.
        """
        if self.exchanged:
            optimizer.step()
        return self.exchanged

    def _gather(self, bucket: GradBucket) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            held = self._sums.get(parameter)
            if held is None:
                self._sums[parameter] = gradient.clone()
            else:
                held.add_(gradient)

    def _release(self, bucket: GradBucket, divide_by: int) -> torch.Tensor:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.copy_(self._sums.pop(parameter)).div_(divide_by)
        buffer: torch.Tensor = bucket.buffer()
        return buffer

    def _ends(self) -> None:
        self._passes += 1
        self.exchanged = self._passes % self.k == 0
        self.report.add(self._used, self._skipped)
        self._used = self._skipped = 0


def every_k(state: EveryKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: see the module. Called by DDP once for every bucket of every backward pass."""
    group = state.group if state.group is not None else dist.group.WORLD
    size = dist.get_world_size(group)
    state._gather(bucket)
    future: torch.futures.Future[torch.Tensor]
    if (state._passes + 1) % state.k == 0:
        state._used += size * state.k
        buffer = state._release(bucket, size * state.k)
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None
        future = work.get_future().then(lambda done: done.value()[0])
    else:
        future = torch.futures.Future()
        future.set_result(bucket.buffer().zero_())
    if bucket.is_last():
        state._ends()
    return future
