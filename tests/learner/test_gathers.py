"""At ZeRO stage 3, parameters are gathered as often as they are used, and the update is that of stage 0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.training.minibatches import filler
from tests.conformance import dense
from tests.conformance.rounding import Gradient, Problem, check, difference, length, unit
from tests.harness.forked_ranks import check_ranks_succeed
from tests.harness.tiny_model import write_tiny_model
from tests.learner import gathered
from tests.learner.cases import CHUNK_TOKENS, micro_batches_of, proximal_of, recipe, scaled, step_data
from tests.learner.gathered import CASES, Pass

pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("forked-ranks")]

GATHERS = 2
"""Of each parameter in a micro-batch that is trained: for the forward pass, and for the backward pass. The head
is not gathered again for each of its chunks. Without a backward pass, it is 1."""
MICRO_BATCHES = (7, 2)
"""Of each rank, before fillers."""
DTYPES = ("float32", "bfloat16")
RATE = 1e-2
"""The learning rate of the cases."""
CERTAIN = 1e-5
"""A gradient of this size has the same sign in every order of its additions, and is large for Adam's epsilon."""


class Results(NamedTuple):
    """By case: rank 0's tensors, and each rank's passes."""

    tensors: dict[str, dict[str, Tensor]]
    passes: dict[str, list[list[Pass]]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose head is a tensor of its own, as in a large model."""
    return write_tiny_model(tmp_path_factory.mktemp("policy"), tied=False, scale=0.1)


@pytest.fixture(scope="module")
def results(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("gathered")
    check_ranks_succeed(partial(gathered.end, str(policy), str(out)), 2, 300)
    passes = {
        name: [
            [Pass(**entry) for entry in json.loads((out / f"{name}.rank-{rank}.json").read_text())] for rank in range(2)
        ]
        for name in CASES
    }
    return Results({name: load_file(out / f"{name}.safetensors") for name in CASES}, passes)


@pytest.fixture(scope="module")
def problem(policy: Path) -> Iterator[Problem]:
    case, threads = next(iter(CASES.values())), torch.get_num_threads()
    torch.set_num_threads(1)  # with tensors this small, more threads are slower
    model, settings = dense.load(policy), recipe(policy, case)
    batch, payloads = step_data(policy, case.data)
    yield Problem(model, batch.groups, payloads, settings, proximal_of(case), scaled(model))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_gathers_per_micro_batch(rank: int, dtype: str, policy: Path, results: Results) -> None:
    passes = results.passes[f"{dtype}-3"][rank]
    own = [batch.targets.numel() for batch in micro_batches_of(policy, next(iter(CASES.values())), 2)[rank]]
    tokens = own + [filler().targets.numel()] * (max(MICRO_BATCHES) - len(own))
    assert len(own) == MICRO_BATCHES[rank], "one of the ranks needs fillers"
    # The recomputed proximal, the reference, and the training, each over all micro-batches.
    assert [(entry.trained, entry.tokens) for entry in passes] == [
        (trained, count) for trained in (False, False, True) for count in tokens
    ]
    assert [-(-count // CHUNK_TOKENS) for count in tokens[:3]] == [[3, 1, 1], [2, 2, 1]][rank], "chunks of each"
    for entry in passes:
        assert set(entry.gathers.values()) == {GATHERS if entry.trained else 1}, entry
        assert len(entry.gathers) == 21


def gradient_of(found: dict[str, Tensor]) -> Gradient:
    return {name.removeprefix("moment."): 10 * moment for name, moment in found.items() if name.startswith("moment.")}


@pytest.mark.parametrize("stage", [0, 3])
def test_float32_is_within_the_rounding_of_the_exact(stage: int, results: Results, problem: Problem) -> None:
    found, bound = results.tensors[f"float32-{stage}"], problem.bound(torch.float32)
    assert problem.margin() > 5 * bound.nats
    check(float(found["loss"]), gradient_of(found), problem.exact(), bound)


def test_bfloat16_adds_up_the_same_gradients_as_stage_0(results: Results, problem: Problem) -> None:
    """Both stages compute the gradient of a micro-batch alike, and add them up in bfloat16, each in its own order."""
    whole, cut = (gradient_of(results.tensors[f"bfloat16-{stage}"]) for stage in (0, 3))
    # Each response is a micro-batch of its own.
    bound = problem.order_bound(torch.bfloat16, len(problem.responses))
    apart = difference(cut, whole)
    smallest = min(map(length, problem.responses)) / length(problem.exact().gradient)
    print(f"|dg| / |g| = {apart:.1e} of {bound:.1e}, the smallest response is {smallest:.1e}")
    assert apart <= bound < smallest


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_update_is_that_of_stage_0(dtype: str, results: Results) -> None:
    """Adam's first update is the learning rate in size, so it is equal wherever the gradient's sign is certain."""
    whole, cut = (results.tensors[f"{dtype}-{stage}"] for stage in (0, 3))
    gradients = gradient_of(whole), gradient_of(cut)
    certain = []
    for name in gradients[0]:
        weights = whole[f"weight.{name}"].double()
        others = cut[f"weight.{name}"].double()
        apart = (others - weights).abs()
        rounding = 2 * unit(getattr(torch, dtype)) * torch.maximum(weights.abs(), others.abs())
        smaller = torch.minimum(gradients[0][name] * gradients[1][name].sign(), gradients[1][name].abs())
        same = (smaller > CERTAIN) | ((gradients[0][name] == 0) & (gradients[1][name] == 0))
        # Adam's epsilon of 1e-8 is a thousandth of the gradient at most.
        assert bool((apart <= 1e-3 * RATE + rounding)[same].all()), name
        assert bool((apart <= 2 * RATE + rounding).all()), name
        certain.append(same.flatten())
    assert float(torch.cat(certain).double().mean()) > 0.99
