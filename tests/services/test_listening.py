"""Sockets of torch's groups listen on one address; the variables of their backends name its interface."""

from __future__ import annotations

import socket

import psutil
import pytest

from services.contracts.listening import GLOO, NCCL, listening_socket, socket_environment
from tests.harness.free_ports import free_port

LOOPBACKS = ("127.0.0.1", "127.0.0.2", "localhost")


def interfaces() -> dict[str, str]:
    """The interface of each IPv4 address of this machine."""
    return {
        entry.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for entry in addresses
        if entry.family is socket.AF_INET
    }


def test_a_store_listens_on_its_address_alone() -> None:
    # Not port 0: another test's server may have got the same ephemeral port on 127.0.0.1.
    with listening_socket("127.0.0.2", free_port()) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.2"
        with socket.create_connection((host, port), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(RuntimeError, match=rf"cannot listen on 127.0.0.2:{port}: Address already in use"):
            listening_socket(host, port)


def test_a_store_may_choose_a_free_port() -> None:
    with listening_socket("127.0.0.2", 0) as first, listening_socket("127.0.0.2", 0) as second:
        assert first.getsockname() != second.getsockname()


@pytest.mark.parametrize("host", LOOPBACKS)
def test_loopback_replaces_what_a_shell_has_set(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "eth7")
    monkeypatch.setenv(NCCL, "eth7")
    name = interfaces()["127.0.0.1"]
    assert socket_environment(host) == {GLOO: name, NCCL: f"={name}"}


def test_on_a_network_the_operator_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO, raising=False)
    networks = {address: name for address, name in interfaces().items() if not address.startswith("127.")}
    for address, name in networks.items():
        assert socket_environment(address) == {GLOO: name}
        with monkeypatch.context() as given:
            given.setenv(GLOO, "eth7")
            assert socket_environment(address) == {GLOO: "eth7"}


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"PENSTOCK_HOST: '192\.0\.2\.254' is not valid: expected an address"):
        socket_environment("192.0.2.254")
