"""Owns where the groups of torch listen: on the address at which this process is reached, and on no other.

Must not import torch. Its stores would listen on every interface of the machine, whatever address they are given, so
they get a socket that listens already; its backends choose an interface by a variable.
"""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import psutil

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
BACKLOG = 1024
"""Connections that wait for the store: a fleet connects at once."""


def advertised_host() -> str:
    """The address at which other processes reach this one: PENSTOCK_HOST, else loopback."""
    return os.environ.get("PENSTOCK_HOST", LOOPBACK)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on `host:port` alone; with port 0, on a free port. Raises RuntimeError, as a store does."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise RuntimeError(f"the store of a group cannot listen on {host}:{port}: {error.strerror}") from None


def socket_environment(host: str) -> dict[str, str]:
    """The variables with which Gloo and NCCL listen on the interface of `host`, an address of this machine.

    Set them before the first group. Without them, Gloo takes the address of the machine's name, and NCCL that of any
    interface except loopback. On a network the operator may know better: Gloo's variable is not replaced, and NCCL
    chooses by itself, because it finds the fast interfaces. Raises ValueError.
    """
    interface = _interface(host)
    if ip_address(socket.gethostbyname(host)).is_loopback:
        return {GLOO: interface, NCCL: f"={interface}"}  # the = makes it a name; NCCL would take it for a prefix
    return {GLOO: os.environ.get(GLOO, interface)}


def _interface(host: str) -> str:
    address = socket.gethostbyname(host)
    wanted = LOOPBACK if ip_address(address).is_loopback else address
    found = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(entry.family is socket.AF_INET and entry.address == wanted for entry in addresses):
            return name
    raise ValueError(f"PENSTOCK_HOST: {host!r} is not valid: expected an address of an interface of this machine")
