"""The command line of the peer process: configuration, lock, logging, signals, exit status."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from frogzmq.config import load_config, runtime_dir, warn_unknown_variables
from frogzmq.daemon.build import Peer
from frogzmq.daemon.lock import HANDOVER_S, PATIENCE_S, PeerLock
from frogzmq.daemon.memory import keep_freed_buffers
from frogzmq.errors import FrogError

log = logging.getLogger("frogzmq.peer")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a peer; 0 after a clean stop, 1 where it could not start or failed, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="frogzmq peer", description="Run this machine's peer.")
    parser.add_argument("--config", type=Path, help="TOML file with settings (default: FROGZMQ_CONFIG)")
    parser.add_argument("--ephemeral", action="store_true", help="end when the last rank has gone")
    args = parser.parse_args(argv)
    try:
        return run(args.config, ephemeral=args.ephemeral)
    except FrogError as error:
        print(f"frogzmq peer: {error}", file=sys.stderr, flush=True)
        return 1


def run(config_path: Path | None = None, *, ephemeral: bool = False, directory: Path | None = None) -> int:
    """Start a peer in this process's main thread and serve until it is stopped."""
    config = load_config(config_path)
    directory = runtime_dir(explicit=directory)
    logging.basicConfig(
        stream=sys.stderr, level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    logging.captureWarnings(True)
    warn_unknown_variables()
    keep_freed_buffers()
    lock = PeerLock(directory, HANDOVER_S if ephemeral else PATIENCE_S)
    try:
        signals = _Signals()
        peer = Peer(config, directory, ephemeral=ephemeral)
        try:
            _tune()
            signals.stop_with(peer.loop.stop)
            peer.run()
        finally:
            peer.close()
    finally:
        lock.release()
    log.log(logging.ERROR if peer.loop.failed else logging.INFO, "stopped: %s", peer.loop.why)
    return 1 if peer.loop.failed else 0


class _Signals:
    """SIGTERM and SIGINT stop the peer, also while it is being built; a terminal that goes away does not."""

    def __init__(self) -> None:
        self._got = ""
        self._stop: Callable[[str], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: object) -> None:
        self._got = signal.Signals(number).name
        if self._stop is not None:
            self._stop(self._got)

    def stop_with(self, stop: Callable[[str], None]) -> None:
        """From now on a signal calls ``stop``; one that came before does so now."""
        self._stop = stop
        if self._got:
            stop(self._got)


def _tune() -> None:
    """What was made at the start lives for ever: keep the collector from looking at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    # Worker threads give the interpreter lock away at every numpy call; the default has them wait up to 5 ms
    # to get it back from the loop, which costs a pipeline of half-millisecond folds more than the folds.
    sys.setswitchinterval(0.0005)
    gc.enable()
