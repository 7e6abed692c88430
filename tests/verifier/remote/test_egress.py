"""Where requests of rewards may go."""

from __future__ import annotations

import pytest

from verifier.remote.egress import check_host, is_refused, resolved
from verifier.remote.faults import RemoteSetupError, ServiceFaultError

ADDRESSES = {
    "169.254.169.254": True,
    "169.254.0.1": True,
    "fe80::1": True,
    "febf::1": True,
    "fe80::1%1": True,
    "fd00:ec2::254": True,
    "100.100.100.200": True,
    "::ffff:169.254.169.254": True,
    "::169.254.169.254": True,
    "64:ff9b::a9fe:a9fe": True,
    "2002:a9fe:a9fe::1": True,
    "127.0.0.1": False,
    "::1": False,
    "10.0.0.1": False,
    "fd00::1": False,
    "fec0::1": False,
    "64:ff9b::808:808": False,
}


@pytest.mark.parametrize(("address", "refused"), ADDRESSES.items())
def test_link_local_addresses_are_refused(address: str, refused: bool) -> None:
    assert is_refused(address) is refused


@pytest.mark.parametrize("host", ["rewards.internal", "Rewards.Internal.", "REWARDS.INTERNAL"])
def test_an_allowed_host_is_one_whatever_its_case(host: str) -> None:
    check_host("http.url", host, frozenset({"rewards.internal"}))
    check_host("http.url", host, None)


@pytest.mark.parametrize("host", ["internal", "a.rewards.internal", "rewards.internal.evil.example", "127.0.0.1"])
def test_another_host_is_refused(host: str) -> None:
    with pytest.raises(RemoteSetupError, match=r"verifier\.rewardHosts of the chart allows: one of rewards\.internal"):
        check_host("http.url", host, frozenset({"rewards.internal"}))


def test_without_a_list_of_hosts_none_is_allowed() -> None:
    with pytest.raises(RemoteSetupError, match="allows: none, because it is empty"):
        check_host("http.url", "a", frozenset())


async def test_a_name_without_an_address_is_an_error() -> None:
    for host in ("no-such-host.invalid", "a..b", "x" * 70):
        with pytest.raises(ServiceFaultError, match="its address was not found"):
            await resolved(host, 80)
