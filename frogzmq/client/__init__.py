"""The rank's side: one connection to this machine's peer, groups, ops. Needs numpy, never torch."""

from __future__ import annotations

from frogzmq.client.client import Client
from frogzmq.client.group import GroupHandle
from frogzmq.client.ops import Op

__all__ = ["Client", "GroupHandle", "Op"]
