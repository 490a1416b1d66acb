"""This machine's addresses: which network namespace it is in, and where other machines may dial it.

Host names play no part: many systems map their own name to 127.0.1.1, which nobody else can dial. What
counts is the kernel's route towards the other machine, and the addresses of the interfaces that are up.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

_PUBLIC = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation: routed like any far one. No packet is sent to them."""
_DISCARD_PORT = 9
_INNER = (
    "docker", "br-", "virbr", "veth", "lxc", "lxdbr", "podman", "cni", "flannel", "cali", "vboxnet", "vmnet",
)  # fmt: skip
"""Names of interfaces that lead to containers and virtual machines, rarely to another machine."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NET_NAMESPACE = Path("/proc/self/ns/net")


class InterfaceAddress(NamedTuple):
    """One address of an interface that is up; ``address`` without a zone."""

    interface: str
    address: str


def netns_id() -> str:
    """Boot id and network namespace: equal for two processes that share a loopback interface.

    Empty where the system does not tell; processes then meet over the network.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}:{os.stat(_NET_NAMESPACE).st_ino}"
    except OSError:
        return ""


def candidate_addresses(towards: str | None = None) -> list[str]:
    """Addresses under which another machine may reach this one, best first, without duplicates.

    First the one that packets to ``towards`` (an IP address or host name; None: anywhere far) would carry,
    then all others: IPv4, global IPv6, and last those of container and virtual machine bridges. Loopback,
    link-local, multicast and unspecified addresses are never among them; the list may be empty.
    """
    return order_addresses(source_addresses(towards), interface_addresses())


def source_addresses(towards: str | None = None) -> list[str]:
    """What the kernel would send from, towards a host; empty where there is no route or no such name."""
    if towards is None:
        targets = [(family, (address, _DISCARD_PORT)) for family, address in _PUBLIC.items()]
    else:
        try:
            found = socket.getaddrinfo(towards, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            return []
        targets = [(row[0], (str(row[4][0]), _DISCARD_PORT)) for row in found if row[0] in _PUBLIC]
    return [source for family, target in targets if (source := _source(family, target))]


def _source(family: int, target: tuple[str, int]) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # chooses a route and a source; a datagram socket sends nothing by it
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_addresses() -> list[InterfaceAddress]:
    """All IP addresses of interfaces that are up, in the system's order."""
    states = psutil.net_if_stats()
    rows: list[InterfaceAddress] = []
    for interface, addresses in psutil.net_if_addrs().items():
        if interface in states and not states[interface].isup:
            continue
        rows.extend(
            InterfaceAddress(interface, row.address.partition("%")[0])
            for row in addresses
            if row.family in _PUBLIC
        )
    return rows


def order_addresses(preferred: Sequence[str], found: Sequence[InterfaceAddress]) -> list[str]:
    """``preferred``, then ``found`` by rank; pure. Preferred ones that lead nowhere else are dropped too."""
    usable = [row for row in found if is_dialable(row.address)]
    usable.sort(key=_rank)  # stable: the system's order within a rank
    ordered = [address for address in preferred if is_dialable(address)]
    return list(dict.fromkeys(ordered + [row.address for row in usable]))


def _rank(row: InterfaceAddress) -> tuple[bool, bool]:
    return row.interface.startswith(_INNER), ipaddress.ip_address(row.address).version == 6


def is_dialable(address: str) -> bool:
    """Whether another machine could dial the address at all (zones and host names: no)."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if ip.version == 6 and getattr(ip, "scope_id", None):
        return False
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified)


def tcp_endpoint(address: str, port: int) -> str:
    """``tcp://address:port``, with brackets around IPv6."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
