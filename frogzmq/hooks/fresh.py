"""``fresh_only``: a step uses the contributions that have been observed when its gradients are consumed.

Meaning: a rank's gradient for a step is the plain mean over the ranks whose contribution to that step it
holds at the end of its backward pass (after ``grace_s`` at most); its own is always among them. What comes
later is dropped, never applied to another step. Ranks may so use different sets and drift apart: ``resync``
makes their parameters equal again, and belongs at least at the end of training and before saving.

Every rank broadcasts its buckets; a broadcast materialises on its own, in whatever order they arrive. A rank
is never more than ``max_behind`` steps ahead of what it has received from the slowest: that bounds memory.
"""

# No postponed annotations: DDP compares those of a hook with its classes.
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from frogzmq.hooks.report import Report

POLL_S = 0.0005
MAX_BEHIND = 4


@dataclass
class _Exchange:
    """One bucket of one step: what every rank gave (or will have given) to it."""

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    given: list[torch.Tensor]
    works: list[dist.Work]
    """By group rank; the own one among them."""


class FreshState:
    """State of ``fresh_only`` for one model: ``ddp.register_comm_hook(FreshState(), fresh_only)``.

    ``group``: the ranks that exchange. Default: a new group of all ranks, so that late contributions hold up
    nobody else's operations; making it is a collective call, like ``new_group``.
    ``grace_s``: seconds to wait for stragglers at the end of a backward pass.
    ``max_behind``: steps whose late contributions may still be on their way before a rank waits for them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        grace_s: float = 0.0,
        max_behind: int = MAX_BEHIND,
    ) -> None:
        if grace_s < 0 or max_behind < 1:
            raise ValueError(
                f"fresh_only needs grace_s >= 0 and max_behind >= 1, not {grace_s} and {max_behind}"
            )
        self.group = dist.new_group() if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.grace_s, self.max_behind = grace_s, max_behind
        self.report = Report()
        self._sources = dist.get_process_group_ranks(self.group)
        self._step: list[_Exchange] = []
        self._late: deque[list[tuple[dist.Work, torch.Tensor]]] = deque()

    def resync(self, module: torch.nn.Module) -> None:
        """Take in everything late, then make all ranks' parameters equal to their mean. Collective.

        Floating-point buffers are averaged as well; others are taken from the group's first rank.
        """
        self.drain()
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point() or tensor.is_complex():
                    dist.all_reduce(tensor, group=self.group)
                    tensor.div_(self.size)
                else:
                    dist.broadcast(tensor, self._sources[0], group=self.group)

    def drain(self) -> None:
        """Wait for every late contribution, and drop it."""
        while self._late:
            self._wait_oldest()

    # ---------------------------------------------------------------- the hook's parts
    def _give(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        # The own gradient is copied: the buffer takes the outcome while others may still be reading.
        given = [buffer.clone() if r == self.rank else torch.empty_like(buffer) for r in range(self.size)]
        works = []
        for tensor, source in zip(given, self._sources, strict=True):
            work = dist.broadcast(tensor, source, group=self.group, async_op=True)
            assert work is not None
            works.append(work)
        self._step.append(_Exchange(buffer, future, given, works))
        return future

    def _consume(self) -> None:
        """The backward pass ends: decide for every bucket what it is made of."""
        step, self._step = self._step, []
        until = time.monotonic() + self.grace_s
        others = [w for each in step for r, w in enumerate(each.works) if r != self.rank]
        while not all([work.is_completed() for work in others]) and time.monotonic() < until:
            time.sleep(POLL_S)
        used = skipped = 0
        missing: set[int] = set()
        late: list[tuple[dist.Work, torch.Tensor]] = []
        for each in step:
            fresh = [r == self.rank or work.is_completed() for r, work in enumerate(each.works)]
            self._mix(each, fresh)
            used += sum(fresh)
            skipped += self.size - sum(fresh)
            missing |= {r for r, came in enumerate(fresh) if not came}
            late += [
                pair
                for pair, came in zip(zip(each.works, each.given, strict=True), fresh, strict=True)
                if not (came and pair[0].is_completed())
            ]
        self.report.add(used, skipped, tuple(sorted(missing)))
        self._late.append(late)
        while self._late and all(work.is_completed() for work, _ in self._late[0]):
            self._wait_oldest()
        while len(self._late) > self.max_behind:
            self._wait_oldest()

    def _mix(self, each: _Exchange, fresh: list[bool]) -> None:
        """The mean of what came, added in rank order."""
        chosen = []
        for r, came in enumerate(fresh):
            if came:
                if r != self.rank:
                    each.works[r].wait()  # done: this only raises its error, if it failed
                chosen.append(each.given[r])
        each.buffer.copy_(chosen[0])
        for tensor in chosen[1:]:
            each.buffer.add_(tensor)
        each.buffer.div_(len(chosen))
        each.future.set_result(each.buffer)

    def _wait_oldest(self) -> None:
        for work, _ in self._late.popleft():
            work.wait()


def fresh_only(state: FreshState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: see the module. Called by DDP once for every bucket of every backward pass."""
    future = state._give(bucket)
    if bucket.is_last():
        state._consume()
    return future
