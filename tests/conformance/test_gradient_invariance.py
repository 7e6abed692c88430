"""The trainer's gradient is the loss's own, as a dense float64 computation gives it, however the work is cut up."""

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
from torch import Tensor

from learner.algorithm.loss import HISTOGRAMS, PERCENTILES
from learner.ranks import Ranks
from learner.trainer import Trained, leave
from tests.conformance import dense
from tests.conformance.invariance import CASES, STEPS
from tests.harness.tiny_model import write_tiny_model
from tests.learner.cases import (
    CHUNK_TOKENS,
    micro_batch_counts,
    micro_batches_of,
    proximal_of,
    recipe,
    run_case,
    scaled,
    step_data,
)

ROOT = Path(__file__).parents[2]
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Largest |dg| / |g| against the dense float64 gradient."""

# DeepSpeed imports and calls parts of torch that announce their end; neither is ours to change.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]
Found = dict[str, Tensor]
Single = Callable[[str], tuple[Found, Trained]]
Expected = Callable[[str], tuple[float, Found]]
NAMED = [
    pytest.param(name, marks=pytest.mark.conformance(
        formula=f"g = dL/dw of the mini-batch ({case.dtype}: {TOLERANCE[case.dtype]:.0e})",
        setting=f"ZeRO {case.stage}, {name}",
    ))
    for name, case in CASES.items()
]  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy"), scale=0.1)


@pytest.fixture(scope="module")
def single(policy: Path) -> Iterator[Single]:
    """What one rank found."""
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    yield cache(lambda name: run_case(policy, (CASES | STEPS)[name], ranks))
    leave(ranks)


@pytest.fixture(scope="module")
def double(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What two real ranks found, all cases in one pair of processes."""
    out = tmp_path_factory.mktemp("two-ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(out / "extensions"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    program = str(ROOT / "tests/conformance/invariance.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(policy), str(rank), "2", str(port), str(out)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=270)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert not (out / "extensions").exists(), "DeepSpeed compiled something"
    return {name: load_file(out / f"{name}.safetensors") for name in CASES | STEPS}


@pytest.fixture(scope="module")
def expected(policy: Path) -> Expected:
    """(loss, gradient by name) of a case, written down densely; rank, stage, budget and layout do not enter."""

    def compute(name: str) -> tuple[float, Found]:
        case = CASES[name]
        settings = recipe(policy, case)
        batch, payloads = step_data(policy, case.data)
        model = dense.load(policy)
        reference = scaled(model) if settings.algorithm.kl_coefficient else None
        loss = dense.loss(model, batch.groups, payloads, settings, proximal_of(case), reference)
        loss.backward()
        return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}

    return cache(compute)


def relative_difference(found: Found, gradient: Found) -> float:
    """|found - gradient| / |gradient| over all tensors; `found` holds Adam's first moments, a tenth of the gradient."""
    left = torch.cat([10 * found[f"moment.{name}"].double().flatten() for name in gradient])
    right = torch.cat([one.flatten() for one in gradient.values()])
    return float((left - right).norm() / right.norm())


def check(name: str, ranks: int, found: Found, gradient: Found) -> None:
    difference = relative_difference(found, gradient)
    print(f"{name}, {ranks} ranks, {CASES[name].dtype}: |dg| / |g| = {difference:.1e}")
    assert difference <= TOLERANCE[CASES[name].dtype]


@pytest.mark.parametrize("name", NAMED)
def test_one_rank(name: str, single: Single, expected: Expected) -> None:
    loss, gradient = expected(name)
    found, trained = single(name)
    check(name, 1, found, gradient)
    assert trained.optimizer[0].loss == pytest.approx(loss, rel=TOLERANCE[CASES[name].dtype])


@pytest.mark.parametrize("name", NAMED)
def test_two_ranks(name: str, single: Single, double: dict[str, Found], expected: Expected) -> None:
    loss, gradient = expected(name)
    check(name, 2, double[name], gradient)
    tolerance = TOLERANCE[CASES[name].dtype]
    assert float(double[name]["metric.first_loss"]) == pytest.approx(loss, rel=tolerance)
    check_metrics(double[name], single(name)[1], 10 * tolerance)


def check_metrics(found: Found, trained: Trained, tolerance: float) -> None:
    # A rounded log-ratio may fall into the next bin of the histogram that a percentile comes from; and DeepSpeed gives
    # the norm in float32, whatever the gradient's dtype.
    rounded = dict.fromkeys([f"{name}_p{one}" for name in HISTOGRAMS for one in PERCENTILES], 0.05)
    rounded["gradient_norm"] = 1e-6
    for metric in trained.metrics.keys() - {"learning_seconds"}:
        loose = max(tolerance, rounded.get(metric, 0.0))
        assert float(found[f"metric.{metric}"]) == pytest.approx(trained.metrics[metric], rel=loose, abs=1e-6), metric


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.conformance(
        formula="one optimizer step per mini-batch of whole groups", setting=f"mini_batch_groups, 2 ranks, {name}"
    ))
    for name in STEPS
])  # fmt: skip
def test_two_ranks_take_the_same_optimizer_steps(name: str, single: Single, double: dict[str, Found]) -> None:
    """What one rank's steps come to is judged by tests/learner/test_gradients.py."""
    found, trained = single(name)
    assert trained.optimizer_steps == 2
    assert double[name].keys() >= found.keys()
    left, right = (torch.cat([one[key].flatten() for key in sorted(found)]) for one in (double[name], found))
    assert float((left - right).norm() / right.norm()) <= 1e-10
    check_metrics(double[name], trained, 1e-8)


@pytest.mark.conformance(formula="the cases above differ as they are meant to", setting="micro_batch_tokens, ranks")
def test_the_cases_differ_as_meant(policy: Path, single: Single) -> None:
    def counts(name: str, ranks: int) -> list[int]:
        return micro_batch_counts(policy, CASES[name], ranks)

    def chunks(name: str) -> list[list[int]]:
        """Per rank and micro-batch, how often the head would run if the ranks did not agree on it."""
        parts = micro_batches_of(policy, CASES[name], 2)
        return [[-(-one.targets.numel() // CHUNK_TOKENS) for one in part] for part in parts]

    assert counts("whole", 1) == [1]
    assert counts("split", 1) == [2]
    assert counts("one-response-each", 1) == [8]
    assert counts("lopsided", 2) == counts("zero-3-lopsided", 2) == [3, 1]
    assert chunks("lopsided") == chunks("zero-3-lopsided") == [[3, 2, 2], [1]]
    assert counts("single", 2) == counts("zero-3-single", 2) == [1, 0]
    everything = single("everything")[1].metrics
    for share in ("clip_low_share", "clip_high_share", "dual_clip_share", "capped_share", "kl_reference"):
        assert 0.05 < everything[share] < 0.95, share
    assert 0.05 < single("icepop")[1].metrics["masked_share"] < 0.95
