"""Which addresses other machines are told."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frogzmq import addresses
from frogzmq.addresses import (
    InterfaceAddress,
    candidate_addresses,
    is_dialable,
    netns_id,
    order_addresses,
    source_addresses,
    tcp_endpoint,
)

FOUND = [
    InterfaceAddress("lo", "127.0.0.1"),
    InterfaceAddress("lo", "::1"),
    InterfaceAddress("docker0", "172.17.0.1"),
    InterfaceAddress("br-0123456789ab", "172.18.0.1"),
    InterfaceAddress("eth0", "fe80::1"),
    InterfaceAddress("eth0", "fd00::7"),
    InterfaceAddress("eth0", "10.0.0.7"),
    InterfaceAddress("wlan0", "192.168.1.7"),
    InterfaceAddress("usb0", "169.254.3.4"),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_routed_address_is_first_and_bridges_are_last():
    order = ["192.168.1.7", "10.0.0.7", "fd00::7", "172.17.0.1", "172.18.0.1"]
    assert order_addresses(["192.168.1.7"], FOUND) == order


def test_a_bridge_is_first_where_the_route_says_so():
    assert order_addresses(["172.17.0.1"], FOUND)[0] == "172.17.0.1"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.0.1.1",
        "0.0.0.0",
        "::",
        "::1",
        "169.254.1.1",
        "fe80::1",
        "fe80::1%eth0",
        "224.0.0.1",
        "host",
    ],
)
def test_addresses_that_lead_nowhere_else_are_never_told(address):
    assert not is_dialable(address)
    assert address not in order_addresses([address], [InterfaceAddress("eth0", "10.0.0.7")])


addresses_of_all_kinds = st.lists(
    st.one_of(st.ip_addresses().map(str), st.sampled_from([row.address for row in FOUND])), max_size=8
)


@given(preferred=addresses_of_all_kinds, found=addresses_of_all_kinds)
def test_order_has_no_duplicates_and_nothing_local(preferred, found):
    ordered = order_addresses(preferred, [InterfaceAddress("eth0", address) for address in found])
    assert len(ordered) == len(set(ordered))
    assert set(ordered) == {address for address in preferred + found if is_dialable(address)}
    assert not any(ipaddress.ip_address(address).is_loopback for address in ordered)


def test_the_machine_s_own_name_plays_no_part(monkeypatch):
    own = candidate_addresses()

    def answer(*_args, **_kwargs):
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: "127.0.1.1")
    assert candidate_addresses() == own
    assert not any(address.startswith("127.") for address in candidate_addresses(socket.gethostname()))


def test_names_that_resolve_nowhere_leave_the_interfaces(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert source_addresses("no-such-host.invalid") == []
    assert set(candidate_addresses("no-such-host.invalid")) >= set(
        order_addresses([], addresses.interface_addresses())
    )


def test_loopback_is_its_own_route():
    assert source_addresses("127.0.0.1") == ["127.0.0.1"]
    assert "127.0.0.1" not in candidate_addresses("127.0.0.1")


def test_interfaces_that_are_down_are_left_out(monkeypatch):
    rows = {"eth0": [SimpleNamespace(family=socket.AF_INET, address="10.0.0.7")],
            "eth1": [SimpleNamespace(family=socket.AF_INET, address="10.0.1.7"),
                     SimpleNamespace(family=socket.AF_PACKET, address="00:11:22:33:44:55")]}  # fmt: skip
    states = {"eth0": SimpleNamespace(isup=False), "eth1": SimpleNamespace(isup=True)}
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: rows)
    monkeypatch.setattr(addresses.psutil, "net_if_stats", lambda: states)
    assert addresses.interface_addresses() == [InterfaceAddress("eth1", "10.0.1.7")]


def test_endpoints_bracket_ipv6():
    assert tcp_endpoint("10.0.0.7", 7000) == "tcp://10.0.0.7:7000"
    assert tcp_endpoint("fd00::7", 7000) == "tcp://[fd00::7]:7000"


def test_the_namespace_is_the_same_in_another_process():
    code = "from frogzmq.addresses import netns_id; print(netns_id())"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert netns_id()
    assert other.stdout.strip() == netns_id()


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_namespace_is_told_apart():
    code = "from frogzmq.addresses import *; print(netns_id(), candidate_addresses())"
    other = run("unshare", "--net", sys.executable, "-c", code)
    if other.returncode:
        pytest.skip(f"cannot make a network namespace: {other.stderr.strip()}")
    found, told = other.stdout.split(maxsplit=1)
    assert found != netns_id()
    assert found.split(":")[0] == netns_id().split(":")[0]
    assert told.strip() == "[]"
