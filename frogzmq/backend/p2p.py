"""Messages between two ranks, in torch's spellings: send, recv, and recv from any source.

A mixin beside ``Collectives``. torch makes ``isend``, ``irecv`` and ``batch_isend_irecv`` of these.
"""

from __future__ import annotations

from typing import Any

import torch

from frogzmq.backend.collectives import _collective as collective
from frogzmq.backend.errors import BadTensor, FrogError
from frogzmq.backend.tensors import dtype_name, read, write_into
from frogzmq.backend.work import FrogWork
from frogzmq.client import GroupHandle
from frogzmq.client.letters import ANY_RANK, Receiving

MAX_TAG = (1 << 31) - 1


class MailWork(FrogWork):
    """A message on its way."""

    def source_rank(self) -> int:
        """The rank that the message came from; raises for a send, and before it has come."""
        if not isinstance(self._op, Receiving):
            raise FrogError(f"{self._name}: source_rank() has no meaning for this operation")
        if self._op.source == ANY_RANK:
            raise FrogError(f"{self._name}: source_rank() before the message has come; call wait() first")
        return self._op.source


class PointToPoint:
    """send, recv and recv from any source."""

    _group: GroupHandle

    @collective("send")
    def send(self, tensors: Any, dst: int, tag: int = 0) -> MailWork:
        """Send one tensor to rank ``dst`` of the group; done when its memory may be used again."""
        tensor = _tensor(tensors, "send")
        self._check(dst, tag, "send", "destination")
        message = self._group.mail.send(dst, tag, dtype_name(tensor, "send"), read(tensor))
        return MailWork(message, [tensor], "send")

    @collective("recv")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> MailWork:
        """Receive the next message with ``tag`` from rank ``src`` of the group into one tensor."""
        tensor = _tensor(tensors, "recv")
        self._check(src, tag, "recv", "source")
        return self._receive(tensor, src, tag)

    @collective("recv_anysource")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> MailWork:
        """Receive the next message with ``tag``, whoever sent it; the work knows who that was."""
        tensor = _tensor(tensors, "recv")
        self._check(0, tag, "recv", "source")
        return self._receive(tensor, ANY_RANK, tag)

    recvAnysource = recv_anysource

    def _receive(self, tensor: torch.Tensor, src: int, tag: int) -> MailWork:
        name = dtype_name(tensor, "recv")
        sinks, finish = write_into([tensor], "recv")
        message = self._group.mail.receive(src, tag, name, sinks, finish=finish)
        return MailWork(message, [tensor], "recv")

    def _check(self, rank: int, tag: int, what: str, role: str) -> None:
        if not 0 <= rank < self._group.size:
            raise BadTensor(
                f"{what}: invalid {role} rank {rank}; the group has ranks 0 to {self._group.size - 1}"
            )
        if not 0 <= tag <= MAX_TAG:
            raise BadTensor(f"{what}: Tag must be nonnegative and at most {MAX_TAG}, got {tag}")


def _tensor(tensors: Any, what: str) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise BadTensor(f"{what}: expected one tensor, got {len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor
