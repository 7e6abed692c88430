"""The gradient of the trainer equals that of a dense float64 computation, for any cut of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.algorithm.loss import HISTOGRAMS, PERCENTILES
from learner.training.process_group import Ranks
from learner.training.results import Trained
from learner.training.trainer import leave
from tests.conformance import dense, invariance
from tests.conformance.faults import FAULTS
from tests.conformance.invariance import CASES, EVERY_COMMIT_ONE_RANK, EVERY_COMMIT_TWO_RANKS, STEPS
from tests.conformance.rounding import Bound, Exact, Gradient, Problem, check, difference
from tests.harness.forked_ranks import check_ranks_succeed
from tests.harness.tiny_model import write_tiny_model
from tests.learner.cases import (
    CHUNK_TOKENS,
    DTYPES,
    Case,
    micro_batch_counts,
    micro_batches_of,
    proximal_of,
    recipe,
    run_case,
    scaled,
    step_data,
)

RANKS_S = 800
"""Time limit for two ranks to run all cases: many times what they need."""

# DeepSpeed uses deprecated parts of torch.
pytestmark = [
    pytest.mark.xdist_group("forked-ranks"),
    pytest.mark.timeout(RANKS_S + 100),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
Found = dict[str, Tensor]
Single = Callable[[str], tuple[Found, Trained]]


class Expected(NamedTuple):
    """The loss and gradient of a case, and the rounding bound of each dtype."""

    problem: Problem
    exact: Exact
    bounds: dict[str, Bound]


Known = Callable[[str], Expected]


def named(every_commit: set[str]) -> list[object]:
    """The cases as parameters; those not in `every_commit` are marked slow."""
    parameters = []
    for name, case in CASES.items():
        formula = f"gradient = dL/dw of the mini-batch ({case.dtype}: to its rounding)"
        marks = [pytest.mark.conformance(formula=formula, setting=f"ZeRO {case.stage}, {name}")]
        if name not in every_commit:
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny policy, with one thread: for tensors this small a second thread is slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield write_tiny_model(tmp_path_factory.mktemp("policy"), scale=0.1)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def single(policy: Path) -> Iterator[Single]:
    """The results of one rank."""
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    yield cache(lambda name: run_case(policy, (CASES | STEPS)[name], ranks))
    leave(ranks)


@pytest.fixture(scope="module")
def double(policy: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Found]:
    """The results of two real ranks, in one pair of processes, for the cases that the selected tests need."""
    asking = [item for item in request.session.items if item.path == request.path and "double" in item.fixturenames]
    names = sorted({item.callspec.params["name"] for item in asking})
    out = tmp_path_factory.mktemp("two-ranks")
    work = partial(invariance.end, policy, out, names)
    check_ranks_succeed(work, 2, RANKS_S, TORCH_EXTENSIONS_DIR=str(out / "extensions"))
    assert not (out / "extensions").exists(), "DeepSpeed compiled something"
    return {name: load_file(out / f"{name}.safetensors") for name in names}


@pytest.fixture(scope="module")
def expected(policy: Path) -> Known:
    """The dense result of a case. It does not depend on rank, stage, dtype, budget or layout."""

    @cache
    def of_data(data: str, algorithm: tuple[tuple[str, object], ...], given_proximal: bool) -> Expected:
        case = Case("dense", data=data, algorithm=dict(algorithm), given_proximal=given_proximal)
        settings = recipe(policy, case)
        batch, payloads = step_data(policy, data)
        model = dense.load(policy)
        reference = scaled(model) if settings.algorithm.kl_coefficient else None
        problem = Problem(model, batch.groups, payloads, settings, proximal_of(case), reference)
        return Expected(problem, problem.exact(), {name: problem.bound(dtype) for name, dtype in DTYPES.items()})

    return lambda name: of_data(
        CASES[name].data, tuple(sorted(CASES[name].algorithm.items())), CASES[name].given_proximal
    )


def gradient_of(found: Found) -> Gradient:
    """The gradient, from Adam's first moments, which are a tenth of it after one step."""
    return {name.removeprefix("moment."): 10 * moment for name, moment in found.items() if name.startswith("moment.")}


@pytest.mark.parametrize("name", named(EVERY_COMMIT_ONE_RANK))
def test_one_rank(name: str, single: Single, expected: Known) -> None:
    known = expected(name)
    found, trained = single(name)
    check(trained.optimizer[0].loss, gradient_of(found), known.exact, known.bounds[CASES[name].dtype])


@pytest.mark.parametrize("name", named(EVERY_COMMIT_TWO_RANKS))
def test_two_ranks(name: str, single: Single, double: dict[str, Found], expected: Known) -> None:
    known, found = expected(name), double[name]
    bound = known.bounds[CASES[name].dtype]
    check(float(found["metric.first_loss"]), gradient_of(found), known.exact, bound)
    check_metrics(found, single(name)[1], 10 * bound.nats, 2 * bound.loss)


DETECTED = [
    *(("everything", fault) for fault in FAULTS),
    *(("lopsided", fault) for fault in FAULTS),
    *(("zero-1-everything", fault) for fault in FAULTS),
    # With 190 tokens, a thousandth of one, or of the few that are clipped, is within the rounding of float32; two
    # thousandths of those that are clipped low are not.
    *(("zero-1-lopsided", fault) for fault in FAULTS if fault not in ("token-off", "clip-low-off", "clip-high-off")),
]


@pytest.mark.conformance(formula="the comparison of gradients detects the smallest faults that matter", setting="dtype")
@pytest.mark.parametrize(("name", "fault"), DETECTED)
def test_a_fault_is_detected(name: str, fault: str, single: Single, expected: Known) -> None:
    known = expected(name)
    found, trained = single(name)
    check_detected(trained.optimizer[0].loss, gradient_of(found), known, name, fault)


@pytest.mark.conformance(
    formula="the comparison of two ranks detects the smallest faults that matter", setting="learner.ranks"
)
@pytest.mark.parametrize(("name", "fault"), [("everything", fault) for fault in FAULTS])
def test_a_fault_is_detected_on_two_ranks(name: str, fault: str, double: dict[str, Found], expected: Known) -> None:
    found = double[name]
    check_detected(float(found["metric.first_loss"]), gradient_of(found), expected(name), name, fault)


def check_detected(loss: float, gradient: Gradient, known: Expected, name: str, fault: str) -> None:
    """Check that the loss, and the gradient by itself, are beyond their bounds from those of a faulty computation."""
    bound, faulty = known.bounds[CASES[name].dtype], FAULTS[fault](known.problem)
    with pytest.raises(AssertionError):
        check(loss, gradient, faulty, bound)
    # The share of a clipped token in the loss is constant, so its gradient is zero for any clip bound.
    if not fault.startswith("clip-"):
        assert difference(gradient, faulty.gradient) > bound.gradient


@pytest.mark.conformance(
    formula="no token is so close to a bound that rounding decides", setting="clip_*, dual_clip, icepop_*"
)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.given_proximal and case.stage == 1])
def test_no_token_is_close_to_a_bound(name: str, expected: Known) -> None:
    known = expected(name)
    assert known.problem.margin() > 5 * known.bounds["float32"].nats


def check_metrics(found: Found, trained: Trained, tolerance: float, loss: float) -> None:
    """Compare all metrics. Except for the loss, whose terms cancel, they are means of one sign, with errors of the size
    of those of log-probs."""
    # A rounded log-ratio may fall into the next bin of the histogram behind a percentile, and DeepSpeed reports the
    # norm in float32 for any dtype of the gradient.
    rounded = dict.fromkeys([f"{name}_p{rank}" for name in HISTOGRAMS for rank in PERCENTILES], 0.05)
    rounded |= {"gradient_norm": 1e-6, "logprob_difference_p99": 0.05}
    assert float(found["metric.loss"]) == pytest.approx(trained.metrics["loss"], rel=0.0, abs=loss)
    for metric in trained.metrics.keys() - {"learning_seconds", "loss"}:
        loose = max(tolerance, rounded.get(metric, 0.0))
        assert float(found[f"metric.{metric}"]) == pytest.approx(trained.metrics[metric], rel=loose, abs=1e-6), metric


@pytest.mark.conformance(formula="the comparison of metrics detects an error of 0.1 % in each", setting="metrics")
@pytest.mark.parametrize(
    "metric",
    ["entropy", "kl_reference", "loss", "mismatch_kl", "ratio_mean", "trained_tokens", "logprob_difference_mean"],
)
def test_a_fault_in_a_metric_is_detected(metric: str, single: Single, expected: Known) -> None:
    name = "zero-1-everything"
    metrics = single(name)[1].metrics
    bound = expected(name).bounds["float32"]
    found = {f"metric.{key}": torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()}
    check_metrics(found, single(name)[1], 10 * bound.nats, 2 * bound.loss)
    found[f"metric.{metric}"] *= 1.001
    with pytest.raises(AssertionError):
        check_metrics(found, single(name)[1], 10 * bound.nats, 2 * bound.loss)


def steps() -> list[object]:
    """The cases with two optimizer steps as parameters."""
    parameters = []
    for name in STEPS:
        formula = "one optimizer step per mini-batch of whole groups"
        marks = [pytest.mark.conformance(formula=formula, setting=f"mini_batch_groups, 2 ranks, {name}")]
        if name not in EVERY_COMMIT_TWO_RANKS:
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.mark.parametrize("name", steps())
def test_two_ranks_take_the_same_optimizer_steps(name: str, single: Single, double: dict[str, Found]) -> None:
    """tests/learner/test_gradients.py checks the optimizer steps of one rank."""
    found, trained = single(name)
    assert trained.optimizer_steps == 2
    assert double[name].keys() >= found.keys()
    left, right = (torch.cat([tensors[key].flatten() for key in sorted(found)]) for tensors in (double[name], found))
    assert float((left - right).norm() / right.norm()) <= 1e-10
    check_metrics(double[name], trained, 1e-8, 1e-8)


@pytest.mark.conformance(
    formula="the cases of the gradient comparison differ as intended", setting="micro_batch_tokens, ranks"
)
def test_the_cases_differ_as_intended(policy: Path, single: Single) -> None:
    def counts(name: str, ranks: int) -> list[int]:
        return micro_batch_counts(policy, CASES[name], ranks)

    def chunks(name: str) -> list[list[int]]:
        """Per rank and micro-batch, the number of head calls."""
        parts = micro_batches_of(policy, CASES[name], 2)
        return [[-(-batch.targets.numel() // CHUNK_TOKENS) for batch in part] for part in parts]

    assert counts("whole", 1) == [1]
    assert counts("split", 1) == [2]
    assert counts("one-response-each", 1) == [8]
    assert counts("lopsided", 2) == counts("zero-3-lopsided", 2) == [1, 3]
    assert chunks("lopsided") == chunks("zero-3-lopsided") == [[6], [2, 2, 1]]
    assert counts("single", 2) == counts("zero-3-single", 2) == [1, 0]
    everything = single("everything")[1].metrics
    for share in ("clip_low_share", "clip_high_share", "dual_clip_share", "capped_share", "kl_reference"):
        assert 0.05 < everything[share] < 0.95, share
    assert 0.05 < single("icepop")[1].metrics["masked_share"] < 0.95
