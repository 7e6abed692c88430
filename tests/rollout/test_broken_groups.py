"""A member of a group dies or stops: the others notice within the deadline, leave at once and form the next group."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.training.process_group import nccl_failure_policy, within
from learner.weight_sync.broadcast import Rendezvous
from rollout.channel import Channel, Receiver
from rollout.processes.environment import engine_environment
from rollout.staging import Staging, StagingOptions
from services.contracts import WeightManifest, WeightPlan
from services.contracts.weight_group import GroupLeftError, Membership, Work, nccl_environment, without_watchdog
from services.settings import parse_recipe
from tests.harness.broken_groups import FALLS, Fall, check_ranks, check_weights
from tests.harness.members import TENSOR_BYTES, Member, Plan
from tests.harness.small_run import recipe_document

pytestmark = pytest.mark.xdist_group("forked-ranks")
WORLD = 3
LONG_S = 120.0
HEADER = "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"


@pytest.mark.parametrize("fall", FALLS)
def test_survivors_of_a_weight_sync_form_the_next_group(fall: Fall) -> None:
    check_weights("gloo", WORLD, fall)


@pytest.mark.parametrize("fall", FALLS)
def test_ranks_end_within_the_deadline(fall: Fall) -> None:
    check_ranks("gloo", WORLD, fall)


def learner(rendezvous: Rendezvous) -> tuple[Callable[[], None], Callable[[], None]]:
    group = rendezvous.group(1, 2)
    return group.form, group.abort


def receiver(rendezvous: Rendezvous) -> tuple[Callable[[], None], Callable[[], None]]:
    channel = Channel("gloo", 1, 1, 2, LONG_S, torch.device("cpu"))
    return lambda: channel.join("127.0.0.1", rendezvous.port), channel.abort


@pytest.mark.parametrize("side", [learner, receiver])
def test_a_group_is_left_while_a_member_is_missing(
    side: Callable[[Rendezvous], tuple[Callable[[], None], Callable[[], None]]],
) -> None:
    form, abort = side(Rendezvous("127.0.0.1", "gloo", LONG_S))
    waiting, raised = started(form)
    until(lambda: named("forming-group"))
    abort()
    waiting.join(30)
    assert [type(error) for error in raised] == [GroupLeftError]
    until(lambda: not named("forming-group"))


def send(port: int, rendezvous: Rendezvous) -> tuple[Callable[[], None], Callable[[], None]]:
    group = rendezvous.group(1, 2)

    def work() -> None:
        group.form()
        while True:
            group.send(torch.zeros(TENSOR_BYTES, dtype=torch.uint8))

    return work, group.abort


def receive(port: int, rendezvous: Rendezvous) -> tuple[Callable[[], None], Callable[[], None]]:
    channel = Channel("gloo", 1, 1, 2, LONG_S, torch.device("cpu"))

    def work() -> None:
        channel.join("127.0.0.1", port)
        while True:
            channel.receive(torch.zeros(TENSOR_BYTES, dtype=torch.uint8))

    return work, channel.abort


@pytest.mark.parametrize("side", [send, receive])
def test_a_group_is_left_in_the_middle_of_a_transfer(side: Callable[..., Any]) -> None:
    """The other member stands still, so that the backend's transfer goes on; this one does not wait for it."""
    own, other = Rendezvous("127.0.0.1", "gloo", LONG_S), Member("weights")
    try:
        served = other.ask("serve", "gloo", LONG_S)
        other.ask("fall", "transfer", signal.SIGSTOP)
        port = own.port if side is send else served
        other.tell("take_part", Plan("gloo", 1, int(side is send), 2, port, LONG_S))
        work, abort = side(port, own)
        waiting, raised = started(work)
        until(other.stopped)
        asked = time.monotonic()
        abort()
        assert time.monotonic() - asked < LONG_S / 10, "the backend's transfer goes on for LONG_S"
        waiting.join(30)
        assert [type(error) for error in raised] == [GroupLeftError]
    finally:
        other.end()
    until(lambda: not named("leaving-group"))


def test_a_group_is_left_while_a_transfer_starts() -> None:
    """The thread that transfers holds the backend's group when this process leaves; it must not wait for its end."""
    channel, other = Channel("gloo", 1, 1, 2, LONG_S, torch.device("cpu")), Member("weights")
    try:
        port = other.ask("serve", "gloo", LONG_S)
        other.ask("fall", "transfer", signal.SIGSTOP)
        other.tell("take_part", Plan("gloo", 1, 0, 2, port, LONG_S))
        channel.join("127.0.0.1", port)
        channel.receive(torch.zeros(TENSOR_BYTES, dtype=torch.uint8))
        until(other.stopped)

        def start(group: Receiver) -> Work:
            held = group._group  # type: ignore[attr-defined]
            work = held.broadcast(torch.zeros(TENSOR_BYTES, dtype=torch.uint8), 0)
            channel.abort()
            time.sleep(0.5)  # long enough for a close that does not wait
            return work  # type: ignore[no-any-return]

        waiting, raised = started(lambda: channel._membership.transfer(start))
        waiting.join(30)
        assert [type(error) for error in raised] == [GroupLeftError]
    finally:
        other.end()
    until(lambda: not named("leaving-group"))


def test_a_start_without_end_delays_leaving_to_the_deadline() -> None:
    closed, going_on = threading.Event(), threading.Event()
    membership = Membership[str](1, 2, 0.5, lambda group: closed.set())
    membership.form(lambda: "group")

    def start(group: str) -> Work:
        going_on.wait(60)
        raise RuntimeError("too late")

    waiting, raised = started(lambda: membership.transfer(start))
    until(membership._starting.locked)
    membership.leave()
    assert not closed.wait(0.1), "the group is closed while a transfer starts"
    assert closed.wait(30)
    going_on.set()
    waiting.join(30)
    assert [str(error) for error in raised] == ["too late"]


def named(thread: str) -> bool:
    """Whether a thread of that name is alive."""
    return any(found.name == thread for found in threading.enumerate())


def started(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """The thread that does `work`, and what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - checked by the test
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_an_abandoned_staging_ends_while_its_group_forms() -> None:
    rendezvous = Rendezvous("127.0.0.1", "gloo", LONG_S)
    place = {"host": "127.0.0.1", "port": rendezvous.port, "members": {"replica": 1}, "timeout_s": LONG_S}
    plan = WeightPlan(generation=1, version=1, world=2, **place)
    staging = Staging(StagingOptions(1, "gloo", torch.device("cpu")), plan, WeightManifest(buckets=()), None)
    until(lambda: named("forming-group"))
    staging.abandon()
    until(lambda: staging.progress.phase == "failed")
    assert staging.channel is None
    until(lambda: not named("forming-group"))


def test_a_missing_member_is_named_at_the_deadline() -> None:
    group = Rendezvous("127.0.0.1", "gloo", 1.0).group(1, 3)
    with pytest.raises(RuntimeError, match="waited 1 s for members of a group of 3 to join: member-1, member-2"):
        group.form()
    group.abort()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_weight_group_has_no_watchdog_and_others_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl_environment(2.5):
        monkeypatch.setenv(name, "")  # restored after the test
    recipe = parse_recipe(recipe_document("/m", weights={"timeout_s": 2.5}))
    with engine_environment(recipe):  # that of vLLM's workers
        with without_watchdog():
            assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
        assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "3"


def test_torch_reads_the_variables_of_the_policy() -> None:
    text = (Path(torch.__path__[0]) / HEADER).read_text()
    names = {*nccl_failure_policy(600), *nccl_environment(60)} - {"TORCH_NCCL_NONBLOCKING_TIMEOUT"}  # in NCCLUtils.cpp
    assert [name for name in names if f'"{name}"' not in text] == []
    assert nccl_failure_policy(600)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "SkipCleanUp = 3" in text


def test_work_beyond_its_deadline_is_left_behind() -> None:
    ended = threading.Event()
    with pytest.raises(RuntimeError, match=r"connecting took longer than 0\.1 s"):
        within(0.1, "connecting", lambda: ended.wait(30))
    ended.set()
    with pytest.raises(TimeoutError, match="its own"):
        within(30, "connecting", failing)
    within(30, "connecting", lambda: None)


def failing() -> None:
    raise TimeoutError("its own")
