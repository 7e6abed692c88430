"""vLLM in bfloat16 on a device: its log-probs are the learner's, over nuclei too, and it takes weights over NCCL.

The engine runs in processes of its own, on the last device; the learner is on the first, which may be the same one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.algorithm.parity import EngineComparison
from learner.training.minibatches import PlannedSample, micro_batches
from learner.training.network.policy import inputs, load_policy
from learner.weight_sync.broadcast import Rendezvous, send_snapshot
from learner.weight_sync.snapshot import Snapshot, sums_of
from rollout.engine import Generation, RolloutEngine
from rollout.staging import StagingProgress
from services.contracts import Sampling, TensorEntry, WeightManifest, WeightPlan
from services.contracts.weight_group import nccl_environment
from services.contracts.weight_layout import bucket_layout, cut_buckets
from services.settings import Recipe, parse_recipe
from services.streams.delivery.payloads import SamplePayload
from tests.gpu.needs import device, needs, rehearsing
from tests.harness.tiny_model import write_tiny_model

NEEDED = needs(1, gib=16, packages=("vllm",))
TWO_DEVICES = needs(2, gib=16, nccl=True, packages=("vllm",))
pytestmark = pytest.mark.timeout(900)
PROMPT = [2, 4, *(7 + (31 * i) % 90 for i in range(62))]
TOKENS, RESPONSES, TOP_K, REPLICA, TIMEOUT_S = 64, 8, 20, "rollout-a", 120.0


def recipe(folder: Path, *, backend: str = "gloo", top_k: int | None = None) -> Recipe:
    return parse_recipe(
        {
            "name": "gpu",
            "model": {"path": str(folder), "max_model_len": 256, "head_dtype": "float32"},
            "algorithm": {"group_size": RESPONSES},
            "rollout": {
                "dtype": "bfloat16",
                "gpus": 0 if rehearsing() else 1,
                "max_new_tokens": TOKENS,
                "kv_cache_mib": 256,
                "top_k": top_k,
            },
            "learner": {"dtype": "bfloat16", "gpus": 0 if rehearsing() else 1},
            "weights": {"backend": backend, "timeout_s": TIMEOUT_S},
            "limits": {"rollout_steps": 1, "groups_per_step": 4},
        }
    )


@asynccontextmanager
async def engine(settings: Recipe, folder: Path) -> AsyncIterator[RolloutEngine]:
    """A started engine on the last device, whose weights are version 0."""
    with pytest.MonkeyPatch.context() as patch:
        if not rehearsing():
            patch.setenv("CUDA_VISIBLE_DEVICES", str(torch.cuda.device_count() - 1))
        started = await RolloutEngine.start(settings, str(folder), [], REPLICA)
    try:
        await started.declare(0)
        yield started
    finally:
        await started.stop()


async def generated(started: RolloutEngine, top_k: int | None = None) -> list[Generation]:
    sampling = Sampling(temperature=1.0, top_p=0.7 if top_k else 1.0, top_k=top_k, max_new_tokens=TOKENS)
    return list(await asyncio.gather(*(started.generate(PROMPT, sampling, str(i), i) for i in range(RESPONSES))))


@torch.no_grad()
def compared(folder: Path, found: list[Generation], *, nuclei: bool = True) -> dict[str, float]:
    """The metrics of the parity gate for a learner with the weights in `folder`, on the first device."""
    prompt, payloads, share = np.array(PROMPT, np.int32), {}, []
    for index, generation in enumerate(found):
        ids, behaviour = generation.response_ids, generation.behaviour_logprobs
        drawn_from = generation.nuclei if nuclei else None
        payloads[str(index)] = SamplePayload(prompt, ids, behaviour, "", "length", generation.spans, drawn_from)
        share.append(PlannedSample(str(index), "g", len(ids), 1.0, 1.0, REPLICA))
    policy = load_policy(folder, "bfloat16", 1.0, head_dtype="float32").to(device())
    comparison = EngineComparison([REPLICA])
    for batch in micro_batches(share, payloads, 1024, share_prompts=True):
        part = batch.to(device(), torch.float32)
        learned = policy(**inputs(part)).logprobs
        comparison.add(learned, part.data.behaviour, torch.zeros_like(part.targets))
    return comparison.metrics()


def model(folder: Path, seed: int = 0) -> Path:
    """A tiny model in bfloat16, which never samples a stop token: no text is complete."""
    return write_tiny_model(folder, scale=0.1, seed=seed, dtype=torch.bfloat16)


def within_the_gate(metrics: dict[str, float], settings: Recipe) -> bool:
    """Whether the parity gate would not report this step."""
    print(metrics, "limit", settings.max_logprob_difference)
    assert metrics["compared_tokens"] > RESPONSES
    return metrics["logprob_difference_mean"] < settings.max_logprob_difference


@pytest.mark.parametrize("top_k", [pytest.param(None, marks=NEEDED), pytest.param(TOP_K, marks=NEEDED)])
def test_log_probs_are_those_of_the_learner(top_k: int | None, tmp_path: Path) -> None:
    """With top-k over what each token was drawn from; over the whole vocabulary they would not be."""
    folder = model(tmp_path / "model")
    settings = recipe(folder, top_k=top_k)

    async def sampled() -> list[Generation]:
        async with engine(settings, folder) as started:
            return await generated(started, top_k)

    found = asyncio.run(sampled())
    assert within_the_gate(compared(folder, found), settings)
    if top_k:
        widths = np.concatenate([np.diff(part.nuclei.offsets) for part in found if part.nuclei is not None])
        assert len(widths) == sum(len(part.response_ids) for part in found)
        assert 1 < widths.max() <= TOP_K
        assert not within_the_gate(compared(folder, found, nuclei=False), settings)


def snapshot_of(folder: Path, version: int) -> Snapshot:
    """The weights of a model as the learner publishes them, without a tied head."""
    named = dict(load_policy(folder, "bfloat16", 1.0).causal_lm.named_parameters())
    entries = [TensorEntry(name=name, shape=tuple(value.shape), dtype="bfloat16") for name, value in named.items()]
    manifest, buckets = WeightManifest(buckets=cut_buckets(entries, 200_000)), []
    for part in manifest.buckets:
        layout = bucket_layout(part)
        bucket = torch.zeros(layout.size, dtype=torch.uint8)
        for entry, offset in zip(part, layout.offsets, strict=True):
            raw = named[entry.name].detach().contiguous().view(-1).view(torch.uint8)
            bucket[offset : offset + raw.numel()] = raw
        buckets.append(bucket)
    return Snapshot.of(version, manifest, buckets, [sums_of(bucket.numpy()) for bucket in buckets])


async def update(started: RolloutEngine, rendezvous: Rendezvous, backend: str, snapshot: Snapshot) -> None:
    """Stage a version in the engine's worker while it is sent, then apply it."""
    plan = WeightPlan(
        generation=1,
        version=snapshot.version,
        host=rendezvous.host,
        port=rendezvous.port,
        world=2,
        members={REPLICA: 1},
        timeout_s=TIMEOUT_S,
    )
    group, manifest = rendezvous.group(1, 2), snapshot.manifest.model_dump_json()

    def send() -> None:
        group.form()
        send_snapshot(group, snapshot)

    try:
        await started.call_workers("stage_weights", plan.model_dump_json(), manifest, 1, backend, False)
        await asyncio.to_thread(send)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                [answer] = await started.call_workers("staging_progress")
                progress = StagingProgress(**answer)
                assert progress.phase != "failed", progress.detail
                if progress.phase == "staged":
                    break
                await asyncio.sleep(0.05)
        await started.apply_staged(snapshot.version, TIMEOUT_S)
    finally:
        group.abort()


@pytest.mark.parametrize(
    "backend", [pytest.param("gloo", marks=NEEDED), pytest.param("nccl", marks=TWO_DEVICES, id="nccl")]
)
def test_a_staged_update_reaches_the_engine(backend: str, tmp_path: Path) -> None:
    """Afterwards the log-probs are those of the new weights, and no more those of the old ones."""
    old, new = model(tmp_path / "old"), model(tmp_path / "new", seed=1)
    settings = recipe(old, backend=backend)
    os.environ.update(nccl_environment(TIMEOUT_S))

    async def updated() -> list[Generation]:
        sender = Rendezvous("127.0.0.1", backend, TIMEOUT_S, None if backend == "gloo" else device())
        async with engine(settings, old) as started:
            await update(started, sender, backend, snapshot_of(new, 1))
            return await generated(started)

    found = asyncio.run(updated())
    assert {span.version for part in found for span in part.spans} == {1}
    assert within_the_gate(compared(new, found), settings)
    assert not within_the_gate(compared(old, found), settings)
