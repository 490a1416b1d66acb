"""A torch.distributed backend over a ZeroMQ gossip fabric. Importing this loads neither torch nor zmq."""

from __future__ import annotations

__version__ = "0.1.0"


def _register_backend() -> None:
    """Make ``init_process_group("frogzmq")`` known to torch; harmless when called again."""
    from frogzmq.backend import register

    register()


def _autoload() -> None:
    """Run at the end of ``import torch``; an exception here would make that import fail, so none leaves."""
    try:
        _register_backend()
    except Exception:
        return
