"""Training that changes DDP's meaning on purpose: never a mode of the backend, always asked for by name.

``fresh_only``: a step uses the gradients that have arrived, and nobody waits for a straggler.
``every_k``: gradients gather for k steps before they are exchanged.
Both are communication hooks of ``DistributedDataParallel``; DiLoCo is in ``frogzmq.diloco``. Each keeps a
report of the contributions that it used and skipped. None of them equals a DDP run, and no figure of this
project counts them as one.
"""

from frogzmq.hooks.every import EveryKState, every_k
from frogzmq.hooks.fresh import FreshState, fresh_only
from frogzmq.hooks.report import Report, StepReport

__all__ = ["EveryKState", "FreshState", "Report", "StepReport", "every_k", "fresh_only"]
