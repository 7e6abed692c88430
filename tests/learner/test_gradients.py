"""The gradient is the exact one of the mini-batch, for any split, layout, ZeRO stage and ranks, against plain torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.ranks import Ranks
from learner.trainer import Trained, leave
from services.contracts import Batch
from services.streams.payloads import SamplePayload
from tests.learner.cases import CASES, Case, groups_of, micro_batch_count, recipe, run_case, step_data

ROOT = Path(__file__).parents[2]
# DeepSpeed imports and calls parts of torch that announce their end; neither is ours to change.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]
Found = dict[str, torch.Tensor]
Single = Callable[[str], tuple[Found, Trained]]


def difference(left: Found, right: Found, kind: str, start: Found | None = None) -> float:
    """|left - right| / |right| over all tensors of a kind; with `start`, of what was added to it."""

    def flat(found: Found) -> torch.Tensor:
        parts = [
            (tensor - (start[name.removeprefix("weight.")] if start else 0)).double().flatten()
            for name, tensor in sorted(found.items())
            if name.startswith(kind)
        ]
        return torch.cat(parts)

    return float((flat(left) - flat(right)).norm() / flat(right).norm())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    one = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    yield one
    leave(one)


@pytest.fixture(scope="module")
def single(ranks: Ranks, tiny_model: Path) -> Single:
    return cache(lambda name: run_case(tiny_model, CASES[name], ranks))


@pytest.fixture(scope="module")
def double(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """All cases on two real ranks."""
    out = tmp_path_factory.mktemp("two-ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(out / "extensions"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/learner/cases.py"), str(tiny_model), str(rank), "2", str(port), str(out),
             *CASES],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert not (out / "extensions").exists(), "DeepSpeed compiled something"
    return {name: load_file(out / f"{name}.safetensors") for name in CASES}


def naive_loss(
    model: torch.nn.Module, batch: Batch, payloads: dict[str, SamplePayload], case: Case,
    before: dict[str, torch.Tensor], groups: range,
) -> torch.Tensor:  # fmt: skip
    """Eq. 8 written down: one forward per response, everything unmasked in one sum, cap 2, clip 0.2 / 0.28."""
    total = torch.zeros(())
    tokens = 0
    for group in (batch.groups[index] for index in groups):
        part = torch.zeros(())
        count = sum(one.tokens for one in group.samples if not one.masked)
        for one in group.samples:
            if one.masked:
                continue
            logprobs = response_logprobs(model, payloads[one.payload])
            proximal = before.setdefault(one.payload, logprobs.detach())
            ratio = torch.exp(logprobs - proximal)
            advantage = torch.tensor(one.advantage)
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            behaviour = torch.from_numpy(payloads[one.payload].behaviour_logprobs)
            part = part + (torch.exp(proximal - behaviour).clamp(max=2.0) * objective).sum()
        tokens += count
        total = total + (part / count if case.reduction == "group_token" else part)
    return -total / (len(groups) if case.reduction == "group_token" else tokens)


def response_logprobs(model: torch.nn.Module, payload: SamplePayload) -> torch.Tensor:
    prompt = torch.from_numpy(payload.prompt_ids.astype("int64"))
    response = torch.from_numpy(payload.response_ids.astype("int64"))
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
    return torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]


def reference(folder: Path, case: Case) -> tuple[Found, Found]:
    """Plain torch: (initial weights, moments and weights after the rollout step)."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batch, payloads = step_data(groups_of(case))
    with torch.no_grad():
        before = {key: response_logprobs(model, payload) for key, payload in payloads.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=recipe(folder, case).learner.weight_decay)
    size = case.mini_batch_groups
    for start in range(0, len(batch.groups), size):
        optimizer.zero_grad()
        naive_loss(model, batch, payloads, case, before, range(start, start + size)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.gradient_clip)
        optimizer.step()
    found = {f"weight.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    found |= {f"moment.{name}": optimizer.state[one]["exp_avg"] for name, one in model.named_parameters()}
    return initial, found


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_plain_torch(name: str, single: Single, tiny_model: Path) -> None:
    case = CASES[name]
    initial, expected = reference(tiny_model, case)
    found, trained = single(name)
    tolerance = 1e-4 if name.startswith("two-steps") else 1e-5
    assert difference(found, expected, "moment.") <= tolerance
    assert difference(found, expected, "weight.", initial) <= 1e-3
    assert trained.optimizer_steps == groups_of(case) // case.mini_batch_groups
    assert trained.skipped == 0


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(name: str, single: Single, double: dict[str, Found]) -> None:
    found, trained = single(name)
    tolerance = 1e-4 if name.startswith("two-steps") else 1e-5
    assert difference(double[name], found, "moment.") <= tolerance
    for metric in ("loss", "entropy", "ratio_mean", "mismatch_kl", "effective_sample_size", "trained_tokens"):
        assert float(double[name][f"metric.{metric}"]) == pytest.approx(trained.metrics[metric], rel=1e-4), metric


def test_the_cases_differ_as_meant() -> None:
    assert micro_batch_count(CASES["whole"]) == 1
    assert micro_batch_count(CASES["split"]) >= 3


def test_clipping_scales_the_gradient_to_its_bound(single: Single) -> None:
    whole, clipped = single("whole"), single("clipped")
    norm = whole[1].metrics["gradient_norm"]
    assert norm > 0.5
    scale = {name: tensor * (0.5 / norm) for name, tensor in whole[0].items()}
    assert difference(clipped[0], scale, "moment.") <= 1e-5
    assert clipped[1].metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_short_cut_is_exact(single: Single) -> None:
    short, full = single("two-steps"), single("two-steps-recomputed")
    assert difference(short[0], full[0], "weight.") <= 1e-6
    assert short[1].metrics["ratio_mean"] == pytest.approx(full[1].metrics["ratio_mean"], rel=1e-5)
    assert abs(short[1].metrics["ratio_mean"] - 1.0) > 1e-4
