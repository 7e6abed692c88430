"""Counts of the learner: copies per byte of a published policy, and forward tokens per trained token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from learner.training.process_group import Ranks
from learner.training.trainer import Trainer
from learner.weight_sync import snapshot as snapshots
from learner.weight_sync.broadcast import BroadcastGroup, Rendezvous, send_snapshot
from learner.weight_sync.snapshot import Snapshot, make_manifest, take_snapshot
from rollout.staging import Staging, StagingOptions
from services.contracts import Batch, BatchGroup, BatchSample, WeightPlan
from services.settings import parse_recipe
from services.streams.delivery.payloads import SamplePayload
from tests.harness.batches import batch_with
from tests.operation_counts.bounds import CountExceededError, check
from tests.operation_counts.written_bytes import Traffic, WrittenBytes, counted_traffic

pytestmark = pytest.mark.timeout(120)

HOST = "127.0.0.1"
DEADLINE_S = 60.0
GROUPS, SAMPLES, PROMPT, RESPONSE = 4, 8, 48, 20
TRAINED = GROUPS * SAMPLES * RESPONSE


def trainer(folder: Path, ranks: Ranks, *, mini_batches: int = 1, short_cut: bool = True, kl: float = 0.0) -> Trainer:
    """The learner's trainer on the tiny model."""
    document = {
        "name": "counts",
        "model": {"path": str(folder)},
        "algorithm": {"group_size": SAMPLES, "kl_coefficient": kl},
        "learner": {"micro_batch_tokens": 2048, "mini_batch_groups": GROUPS // mini_batches, "ranks": 1},
        "limits": {"rollout_steps": 1, "groups_per_step": GROUPS, "max_inflight_groups": 2 * GROUPS},
    }
    return Trainer(folder, parse_recipe(document), ranks, short_cut=short_cut)


def batch() -> tuple[Batch, dict[str, SamplePayload]]:
    """A batch of GROUPS groups, whose responses are all trained."""
    draw, groups, payloads = np.random.default_rng(1), [], {}
    for group in range(GROUPS):
        prompt = draw.integers(7, 100, PROMPT, dtype=np.int32)
        samples = []
        for index in range(SAMPLES):
            key, answer = f"{group}:{index}", draw.integers(7, 100, RESPONSE, dtype=np.int32)
            payloads[key] = SamplePayload(prompt, answer, np.full(RESPONSE, -4.0, np.float32), "", "stop", ())
            given = {"reward": 1.0, "correct": True, "masked": False, "staleness": 0}
            samples.append(BatchSample(payload=key, tokens=RESPONSE, advantage=(-1.0) ** index, **given))
        groups.append(BatchGroup(group=f"g{group}", samples=tuple(samples), prompt_tokens=PROMPT))
    return batch_with(groups), payloads


def forward_tokens(folder: Path, ranks: Ranks, **options: Any) -> float:
    """Tokens that pass through a network's layers in a rollout step, with padding, per token in the loss."""
    passed = 0

    def count(module: Any, given: tuple[Any, ...], _: Any) -> None:
        nonlocal passed
        if isinstance(module, torch.nn.Embedding):  # each pass looks its tokens up once
            passed += given[0].numel()

    trained = trainer(folder, ranks, **options)
    data, payloads = batch()
    hook = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        trained.train(trained.plan(data), payloads)
    finally:
        hook.remove()
        trained.close()
    return passed / TRAINED


CASES: dict[str, dict[str, Any]] = {
    "forward tokens per trained token: one optimizer step": {},
    "forward tokens per trained token: two optimizer steps": {"mini_batches": 2},
    "forward tokens per trained token: with a KL reference": {"kl": 0.1},
}


@pytest.mark.parametrize("name", CASES)
def test_each_token_passes_no_more_often_than_needed(name: str, policy: Path, ranks: Ranks) -> None:
    found = forward_tokens(policy, ranks, **CASES[name])
    print(f"{name}: {found:.4g}")
    check(name, found)


def test_a_second_pass_is_noticed(policy: Path, ranks: Ranks) -> None:
    name = next(iter(CASES))
    with pytest.raises(CountExceededError, match=name):
        check(name, forward_tokens(policy, ranks, short_cut=False))


def test_prompts_that_are_not_shared_are_noticed(policy: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(CASES))
    monkeypatch.setattr("learner.training.trainer.can_share_prompts", lambda _: False)
    with pytest.raises(CountExceededError, match=name):
        check(name, forward_tokens(policy, ranks))


class Published(NamedTuple):
    """Of one publication, per byte of the policy: copies of the learner and of a replica, sent and received bytes."""

    snapshot: float
    sent: float
    received: float
    staged: float


def receive(staging: Staging, group: BroadcastGroup, snapshot: Snapshot) -> None:
    """Send a snapshot to a staging of this process; the staging has to have received it as it is."""
    sending = threading.Thread(target=send_snapshot, args=(group, snapshot))
    sending.start()
    ends = time.monotonic() + DEADLINE_S
    while staging.progress.phase == "receiving" and time.monotonic() < ends:
        time.sleep(0.01)
    sending.join(DEADLINE_S)
    assert staging.progress.phase == "staged", staging.progress
    received = dict(staging.tensors())
    assert all(torch.equal(received[name], tensor) for name, tensor in snapshot.tensors())


def published(trained: Trainer) -> Published:
    """Copy the policy, send it to one replica over Gloo, and stage it there."""
    with staged(trained) as (staging, _, copied, traffic):
        size = sum(tensor.nbytes for _, tensor in staging.tensors())
        counted = (copied.total, traffic.sent, traffic.received, traffic.staging.total)
    return Published(*(part / size for part in counted))


@contextmanager
def staged(trained: Trainer) -> Iterator[tuple[Staging, Callable[[Staging], None], WrittenBytes, Traffic]]:
    """A version that has arrived, how to send it again, and what was written and sent until then."""
    manifest = make_manifest(trained, 1)
    copied = WrittenBytes()
    with copied:
        snapshot = take_snapshot(trained, manifest, 1, keep=True)
    assert snapshot is not None
    with counted_traffic() as traffic:
        rendezvous = Rendezvous(HOST, "gloo", DEADLINE_S)
        plan = WeightPlan(
            generation=1,
            version=1,
            host=HOST,
            port=rendezvous.port,
            world=2,
            members={"r": 1},
            timeout_s=DEADLINE_S,
        )
        staging = Staging(StagingOptions(1, "gloo", torch.device("cpu")), plan, manifest, None)
        group = rendezvous.group(1, 2)
        group.form()
        receive(staging, group, snapshot)
    try:
        yield staging, partial(receive, group=group, snapshot=snapshot), copied, traffic
    finally:
        group.abort()
        staging.abandon()


@pytest.fixture(scope="module")
def publisher(policy: Path, ranks: Ranks) -> Iterator[Trainer]:
    trained = trainer(policy, ranks)
    yield trained
    trained.close()


def test_a_published_byte_is_copied_once_on_each_side(publisher: Trainer) -> None:
    found = published(publisher)
    print(found)
    check("copies per byte published: snapshot", found.snapshot)
    check("copies per byte published: sent", found.sent)
    check("copies per byte published: received", found.received)
    check("copies per byte published: staged", found.staged)


def test_the_next_version_arrives_in_the_same_memory(publisher: Trainer) -> None:
    """New memory is mapped page by page while the bytes wait."""
    with staged(publisher) as (staging, send, _, _):
        memory = [tensor.data_ptr() for _, tensor in staging.tensors()]
        plan = staging.plan.model_copy(update={"version": 2})
        again = Staging.after(staging, StagingOptions(1, "gloo", torch.device("cpu")), plan, staging._manifest)
        send(again)
        assert [tensor.data_ptr() for _, tensor in again.tensors()] == memory
        again.abandon()


def test_another_copy_is_noticed(publisher: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    views = snapshots._views

    def cloned(entries: Any, bucket: torch.Tensor) -> list[torch.Tensor]:
        bucket.clone()
        return views(entries, bucket)

    monkeypatch.setattr(snapshots, "_views", cloned)
    with pytest.raises(CountExceededError, match="copies per byte published: snapshot"):
        check("copies per byte published: snapshot", published(publisher).snapshot)
