"""Machines of a LAN on one kernel: network namespaces joined by a bridge, which has a namespace of its own.

Each machine has an address, a host name and a private hosts file that maps that name to 127.0.1.1, as
Debian and Ubuntu install it. Needs root; nothing is ever made in the namespace of the caller.
"""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

CLONE_NEWNET = 0x40000000


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@functools.cache
def refusal() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Lan(1) as lan:
            subprocess.run(lan.command(0, ["true"]), check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


class Lan:
    """``count`` machines, numbered from 0; a context manager that removes them whatever happens."""

    def __init__(self, count: int) -> None:
        self.stem = f"frog{os.getpid()}{secrets.token_hex(2)}"
        self.count = count
        self._made: list[str] = []

    def __enter__(self) -> Lan:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        switch = self._namespace("s")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(self.count):
            name, port = self._namespace(str(number)), f"p{number}"
            _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")

    def _namespace(self, suffix: str) -> str:
        name = self.stem + suffix
        self._made.append(name)
        _ip("netns", "add", name)
        return name

    def close(self) -> None:
        """Remove the namespaces; with them go their interfaces and the bridge."""
        while self._made:
            subprocess.run(["ip", "netns", "delete", self._made.pop()], capture_output=True, check=False)

    def name(self, number: int) -> str:
        """Name of a machine's namespace."""
        return f"{self.stem}{number}"

    @staticmethod
    def address(number: int) -> str:
        """Address of a machine."""
        return f"10.77.3.{number + 1}"

    @staticmethod
    def host(number: int) -> str:
        """Host name of a machine, which its hosts file maps to 127.0.1.1."""
        return f"frog-host-{number}"

    def command(self, number: int, command: Sequence[str], folder: Path | None = None) -> list[str]:
        """``command`` on a machine, in the same process: its pid is that of what is started.

        With ``folder``, where the hosts file is put, the machine has its own host name.
        """
        prefix = ["ip", "netns", "exec", self.name(number)]
        if folder is None:
            return [*prefix, *command]
        hosts = folder / f"hosts{number}"
        host = self.host(number)
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
        script = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        private = ["unshare", "--uts", "--mount", "--propagation", "private"]
        return [*prefix, *private, "sh", "-c", script, os.fspath(hosts), host, *command]

    def entering(self, number: int) -> str:
        """Python statements after which the process that runs them is on a machine (``Fleet.start``)."""
        return (
            "import ctypes, os\n"
            f"fd = os.open('/run/netns/{self.name(number)}', os.O_RDONLY)\n"
            f"assert ctypes.CDLL(None, use_errno=True).setns(fd, {CLONE_NEWNET}) == 0\n"
            "os.close(fd)"
        )
