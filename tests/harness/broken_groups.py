"""Owns the cases in which a member of a group dies or stops, and what its survivors must do; for each backend.

Must not start an engine. tests/rollout runs the cases with Gloo, tests/gpu with NCCL.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import pytest

from tests.harness.free_ports import free_port
from tests.harness.members import Member, Plan, Report

TIMEOUTS_S = {"gloo": 3.0, "nccl": 20.0}
"""Of each blocking call, by backend: the first NCCL communicator of a process takes seconds."""
SLACK_S = 6.0
"""What a busy machine may take beyond a deadline."""
AT_ONCE_S = 0.5


class Fall(NamedTuple):
    """A member's fall: rank 0 (the learner) or the last, when, and how."""

    member: str
    moment: str
    how: signal.Signals


FALLS = [
    pytest.param(Fall(*parts), id="-".join((parts[0], parts[1], parts[2].name)))
    for parts in product(("learner", "receiver"), ("forming", "transfer"), (signal.SIGKILL, signal.SIGSTOP))
]


@contextmanager
def _members(role: str, world: int) -> Iterator[list[Member]]:
    members = [Member(role) for _ in range(world)]
    try:
        yield members
    finally:
        for member in members:
            member.end()


def check_weights(backend: str, world: int, fall: Fall) -> None:
    """The survivors get an error within the deadline, leave at once, form the next group, and keep nothing."""
    timeout_s = TIMEOUTS_S[backend]
    with _members("weights", world + 1) as (*members, replacement):
        port = members[0].ask("serve", backend, timeout_s)
        victim = 0 if fall.member == "learner" else world - 1
        survivors = [member for member in members if member is not members[victim]]
        before = [member.ask("held") for member in survivors]
        members[victim].ask("fall", fall.moment, fall.how)
        for rank, member in enumerate(members):
            member.tell("take_part", Plan(backend, 1, rank, world, port, timeout_s))
        for member in survivors:
            report: Report = member.answer()
            assert report.error, "a survivor did not notice"
            assert report.seconds < timeout_s + SLACK_S, report
            assert member.ask("abort") < AT_ONCE_S
        fallen, members[victim] = members[victim], replacement
        if victim == 0:
            port = replacement.ask("serve", backend, timeout_s)
        for rank, member in enumerate(members):
            member.tell("take_part", Plan(backend, 2, rank, world, port, 10 * timeout_s))
        assert [member.answer().error for member in members] == [""] * world
        for member in members:
            assert member.ask("abort") < AT_ONCE_S
        if victim == 0:
            fallen.end()  # as the host does: a request to the store of a stopped process has no deadline
        if backend == "gloo":  # CUDA and NCCL have threads and connections of the process
            for member, held in zip(survivors, before, strict=True):
                _until_held(member, held, timeout_s)


def _until_held(member: Member, held: tuple[list[str], list[str]], timeout_s: float) -> None:
    ends = time.monotonic() + 2 * timeout_s + SLACK_S
    while (found := member.ask("held")) != held:
        assert time.monotonic() < ends, f"{found} remain of {held}"
        time.sleep(0.1)


def check_ranks(backend: str, world: int, fall: Fall) -> None:
    """The surviving ranks get an error, or end, within the deadline."""
    timeout_s = TIMEOUTS_S[backend]
    with _members("rank", world) as members:
        victim, port = 0 if fall.member == "learner" else world - 1, free_port()
        members[victim].ask("fall", fall.moment, fall.how)
        for rank, member in enumerate(members):
            member.tell("take_part", Plan(backend, 1, rank, world, port, timeout_s))
        for member in members[:victim] + members[victim + 1 :]:
            try:
                report: Report = member.answer()
            except EOFError:
                assert backend == "nccl", "the watchdog of NCCL ends a rank, nothing else does"
                continue
            assert report.error, "a survivor did not notice"
            assert report.seconds < timeout_s + SLACK_S, report
