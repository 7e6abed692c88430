"""A learner on a device: its state continues bit by bit, a snapshot is what the device holds, a value head learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.training.process_group import Ranks
from learner.training.trainer import Trainer
from learner.weight_sync.snapshot import make_manifest, take_snapshot
from services.contracts import WeightManifest
from services.contracts.weight_layout import cut_buckets
from tests.conformance import dense
from tests.gpu.exact import CASES, deterministic, trainer_of
from tests.gpu.needs import needs
from tests.gpu.noise import DRAWS, ROOM, rounding
from tests.learner.cases import PPO, TEMPERATURE, Case, run_case, step_data, value_weight

pytestmark = needs(1)
STAGES = (1, 2, 3)
STEP = replace(CASES["dapo"], mini_batch_groups=1)
"""Three optimizer steps in a rollout step, the later ones with a proximal policy of their own."""


def train(trainer: Trainer, folder: Path) -> tuple[object, ...]:
    """The results of a rollout step."""
    batch, payloads = step_data(folder, STEP.data)
    return trainer.train(trainer.plan(batch), payloads).optimizer


def bits(trainer: Trainer) -> bytes:
    """The captured state."""
    return b"".join(bytes(chunk) for chunk in trainer.capture().chunks())


@pytest.mark.parametrize("stage", STAGES)
def test_a_restored_learner_continues_bit_by_bit(stage: int, policy: Path, ranks: Ranks, tmp_path: Path) -> None:
    """With kernels whose sums have a fixed order: torch then promises the same bits on the same device and release."""
    case, file = replace(STEP, stage=stage), tmp_path / "rank-0000.safetensors"
    with deterministic():
        with trainer_of(policy, case, ranks) as writer:
            train(writer, policy)
            file.write_bytes(bits(writer))
            expected, ended = train(writer, policy), bits(writer)
        with trainer_of(policy, case, ranks) as reader:
            reader.restore([file])
            assert bits(reader) == file.read_bytes()
            assert train(reader, policy) == expected
            assert bits(reader) == ended
    assert ended != file.read_bytes()


def int64_sum(tensor: Tensor) -> int:
    """The sum of a tensor's bytes, padded with zeros, as int64 and without its overflow."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return int(torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64).sum())


@pytest.mark.parametrize("stage", STAGES)
def test_a_snapshot_has_the_sums_of_the_device(stage: int, policy: Path, ranks: Ranks) -> None:
    """Copied to the CPU tensor by tensor, and also summed on the device; each bucket, and every bit."""
    with trainer_of(policy, replace(STEP, stage=stage), ranks) as trainer:
        train(trainer, policy)
        entries = [entry for bucket in make_manifest(trainer, 1).buckets for entry in bucket]
        manifest = WeightManifest(buckets=cut_buckets(entries, 200_000))
        snapshot = take_snapshot(trainer, manifest, 1, keep=True)
        assert snapshot is not None
        held, sums = {}, {}
        for name, parameter in trainer.causal_lm.named_parameters():
            with trainer.gathered([parameter]):
                held[name], sums[name] = parameter.detach().cpu().clone(), int64_sum(parameter.detach())
    copied = dict(snapshot.tensors())
    assert copied.keys() == held.keys()
    assert all(torch.equal(copied[name].view(torch.int16), held[name].view(torch.int16)) for name in held)
    assert [int64_sum(copied[name]) for name in held] == list(sums.values())
    in_buckets = ([sums[entry.name] for entry in bucket] for bucket in snapshot.manifest.buckets)
    by_bucket = [int(torch.tensor(found).sum()) for found in in_buckets]
    assert len(by_bucket) > 3
    assert snapshot.checksums.tolist() == by_bucket


def values_of(model: torch.nn.Module, head: Tensor, key: str, folder: Path) -> tuple[Tensor, Tensor]:
    """(values [n], hidden states [n, H]) at the positions that predict the tokens of a response."""
    payload = step_data(folder, "uneven")[1][key]
    ids = torch.from_numpy(np.concatenate([payload.prompt_ids, payload.response_ids]).astype(np.int64))[None]
    hidden = model.model(input_ids=ids).last_hidden_state[0, len(payload.prompt_ids) - 1 : -1]
    return (hidden @ head.T)[:, 0], hidden


def value_gradient(folder: Path, seed: int | None) -> Tensor:
    """The gradient of the value head [1, H] in float64; with the rounding errors of a seed, unless it is None."""
    model, batch, value = dense.load(folder), step_data(folder, "uneven")[0], PPO["value"]
    head, groups = value_weight(model.config.hidden_size), []
    for group in batch.groups:
        parts = []
        for sample in group.samples:
            with torch.no_grad():
                if seed is None:
                    values, hidden = values_of(model, head, sample.payload, folder)
                else:
                    with rounding(model, seed, head=False):
                        values, hidden = values_of(model, head, sample.payload, folder)
            found, following = [], 0.0
            after = [*values.tolist()[1:], 0.0]
            for index in reversed(range(len(values))):
                earned = sample.advantage if index == len(values) - 1 else 0.0
                delta = earned + value["discount"] * after[index] - float(values[index])
                following = delta + value["discount"] * value["gae_lambda"] * following
                found.append(following)
            # The value loss is (V - R)^2 / 2, and R - V is GAE's advantage before whitening.
            parts.append(-torch.tensor(found[::-1], dtype=torch.float64)[:, None] * hidden)
        groups.append(torch.cat(parts).mean(0))
    return value["coefficient"] * torch.stack(groups).mean(0)[None]


@pytest.mark.parametrize("stage", STAGES)
def test_a_value_head_has_its_gradient(stage: int, policy: Path, ranks: Ranks) -> None:
    """Its own part: the derivative of the value loss by its weight, by GAE's recursion, up to drawn rounding errors."""
    exact = value_gradient(policy, None)
    spread = [float((value_gradient(policy, seed) - exact).norm()) ** 2 for seed in range(DRAWS)]
    bound = ROOM * (sum(spread) / DRAWS) ** 0.5 / float(exact.norm()) + torch.finfo(torch.bfloat16).eps
    case = Case("ppo", stage, "bfloat16", data="uneven", algorithm=PPO)
    found, trained = run_case(policy, case, ranks)
    gradient = 10 * found["moment.value_head.weight"].double().cpu()
    apart = float((gradient - exact).norm() / exact.norm())
    print(f"value head: |dg| / |g| = {apart:.1e} of {bound:.1e} at temperature {TEMPERATURE}")
    assert apart <= bound < 0.5
    assert trained.metrics["value_loss"] > 0
