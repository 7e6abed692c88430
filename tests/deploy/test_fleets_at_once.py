"""Fleets of several runs that are deployed at the same moment, each in a thread of its own, as the controller does."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray, at import

RUNS, TOGETHER = 64, 8


def described(number):
    """What Serve is given of a fleet, without a cluster."""
    from deploy.hosting.fleet import Fleet

    return Fleet(f"run-{number}", "verifier")._described((None, f"run-{number}", "", 1), 1, {"num_cpus": 0.1})


def test_fleets_are_described_in_threads_at_once():
    described(0)
    with ThreadPoolExecutor(TOGETHER) as threads:
        targets = list(threads.map(described, range(RUNS)))
    assert [target.name for target in targets] == [f"run-{number}.verifier" for number in range(RUNS)]


def test_a_fleet_that_waits_for_another_one_says_so(monkeypatch):
    from deploy.hosting import fleet

    monkeypatch.setattr(fleet, "CONTROLLER_S", 0.05)
    with fleet._described_alone(), pytest.raises(TimeoutError, match=r"another fleet has been deployed for 0\.05 s"):
        described(0)
