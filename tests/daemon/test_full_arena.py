"""An op that finds no room fails its group by name; the peer lives on."""

from __future__ import annotations

import threading

import numpy as np
from blake3 import blake3
from support.fleet import Fleet

from frogzmq.client import Client
from frogzmq.descriptor import Descriptor
from frogzmq.errors import FrogError
from frogzmq.types import Mode, OpKind, ReduceOp
from frogzmq.wire.messages import GroupOptions, JoinGroup, Member

SIZE = 16 << 20
CAST = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "uint8", (SIZE,), 0)


def test_no_room_for_a_result_of_which_chunks_are_here_already(fleet: Fleet) -> None:
    peers = [fleet.start(), fleet.start(), fleet.start(config='arena_bytes = "2MiB"')]
    clients = [Client(peer.runtime_dir) for peer in peers]
    members = [
        Member(rank=rank, pid=client.welcome.pid, host="h", who=client.welcome.who)
        for rank, client in enumerate(clients)
    ]
    gid = blake3(str(clients[0].welcome.who.instance).encode()).hexdigest()[:32]
    errors: dict[int, FrogError] = {}
    begun = threading.Event()

    def run(rank: int) -> None:
        join = JoinGroup(
            gid=gid, job="j", name="g", rank=rank, size=3, timeout_s=20.0,
            options=GroupOptions(mode=Mode.SHARD), members=members,
        )  # fmt: skip
        try:
            group = clients[rank].join(join)
            if rank == 2:
                begun.wait(10)
                peers[2].wait_for(lambda snapshot: snapshot["counters"]["chunks_received"] >= 4)
            src = np.ones(SIZE, np.uint8) if rank == 0 else None
            op = group.post(CAST, src, [] if rank == 0 else [np.zeros(SIZE, np.uint8)])
            begun.set()
            op.wait(20)
            group.post(Descriptor(OpKind.BARRIER, ReduceOp.NONE, "uint8", (0,))).wait(20)
        except FrogError as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), fleet.logs()
    assert {type(error).__name__ for error in errors.values()} == {"StoreFull"}
    assert sorted(errors) == [0, 1, 2]
    assert "no room" in str(errors[0])
    for client in clients:
        client.close()
    peers[2].wait_for(lambda snapshot: not snapshot["groups"])
