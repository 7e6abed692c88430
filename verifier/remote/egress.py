"""Owns where requests of rewards may go: to named hosts, and never to an address that serves a machine's credentials.

Must not send anything.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from services.settings.faults import invalid
from verifier.remote.faults import RemoteSetupError, ServiceFaultError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",  # link-local, and the metadata service of nearly all clouds
            "fe80::/10",
            "fd00:ec2::254/128",  # the metadata services with other addresses: EC2, Compute Engine, Alibaba Cloud
            "fd20:ce::254/128",
            "100.100.100.200/32",
        ),
    )
)
"""Networks that no request goes to, whatever name resolves to them."""

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
IPV4_COMPATIBLE = ipaddress.IPv6Network("::/96")
IPV4_BITS = 0xFFFFFFFF


def check_host(field: str, host: str, allowed_hosts: frozenset[str] | None) -> None:
    """Raises RemoteSetupError for a host that is not among `allowed_hosts` (None: any host)."""
    if allowed_hosts is None or plain_host(host) in {plain_host(name) for name in allowed_hosts}:
        return
    allowed = f"one of {', '.join(sorted(allowed_hosts))}" if allowed_hosts else "none, because it is empty"
    raise RemoteSetupError(invalid(field, host, f"a host that verifier.rewardHosts of the chart allows: {allowed}"))


def plain_host(host: str) -> str:
    """A host's name in the form in which two names are compared."""
    return host.lower().rstrip(".")


async def resolved(host: str, port: int) -> list[str]:
    """The addresses of a host that requests may go to, in the system's order of preference.

    Raises ServiceFaultError if it has none. The caller connects to these addresses, not to the name: a second look-up
    could give others.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no host's name"
        raise ServiceFaultError(f"{host}: its address was not found: {reason}", repeats=True, unspent=True) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    usable = [address for address in addresses if not is_refused(address)]
    if not usable:
        raise ServiceFaultError(
            f"{host}: its address {', '.join(addresses)} is refused: link-local and metadata addresses get no requests",
            unspent=True,
        )
    return usable


def is_refused(address: str) -> bool:
    """Whether no request may go to this address, or to the IPv4 address inside it."""
    parsed = ipaddress.ip_address(address)
    return any(inner in network for inner in _reached(parsed) for network in REFUSED)


def _reached(address: Address) -> tuple[Address, ...]:
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    inner = [address.ipv4_mapped, address.sixtofour]
    if address in NAT64 or address in IPV4_COMPATIBLE:
        inner.append(ipaddress.IPv4Address(int(address) & IPV4_BITS))
    return (address, *(found for found in inner if found))
