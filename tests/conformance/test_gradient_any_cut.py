"""Property: any cut of a mini-batch into rows, micro-batches and ranks gives the dense gradient, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from learner.algorithm.loss import LossSettings, token_loss
from learner.algorithm.reductions import REDUCTIONS
from learner.training.minibatches import MicroBatch, filler, longest_shared_row, micro_batches, plan_step
from learner.training.network.policy import PolicyModel, inputs, load_policy
from learner.training.trainer import loss_settings
from services.contracts import Batch, BatchGroup, BatchSample
from services.streams.delivery.payloads import SamplePayload
from tests.conformance import dense
from tests.harness.batches import batch_with
from tests.learner.cases import (
    EVERYTHING,
    ICEPOP,
    TEMPERATURE,
    VOCABULARY,
    Case,
    proximal_of,
    recipe,
    scaled,
    shifted,
)

SEQUENCE = {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.1, "entropy_coefficient": 0.05}
CISPO = {"clipping": "cispo", "clip_low": 1.0, "clip_high": 0.1, "correction": "truncated_is", "kl_coefficient": 0.3}
LOSSES = {
    "plain": Case("plain"),
    "everything": Case("everything", algorithm=EVERYTHING, given_proximal=True),
    "icepop": Case("icepop", algorithm=ICEPOP, given_proximal=True),
    "behaviour": Case("behaviour", algorithm={"proximal": "behaviour", "dual_clip": 1.5}),
    "sequence": Case("sequence", algorithm=SEQUENCE | {"correction": "truncated_is"}, given_proximal=True),
    "sequence-behaviour": Case("sequence-behaviour", algorithm={"ratio": "sequence", "proximal": "behaviour"}),
    "sequence-token": Case(
        "sequence-token", algorithm=ICEPOP | SEQUENCE | {"ratio": "sequence_token"}, given_proximal=True
    ),
    "cispo": Case("cispo", algorithm=CISPO, given_proximal=True),
    "cispo-behaviour": Case("cispo-behaviour", algorithm={"clipping": "cispo", "proximal": "behaviour"}),
}
GROUPS = st.lists(
    st.tuples(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=2, max_size=4)),
    min_size=1,
    max_size=4,
)
Groups = list[tuple[int, list[tuple[int, bool]]]]
"""(prompt tokens, [(response tokens, masked)]) of each group."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand parameters with ordinary layers and norms."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@cache
def policy_of(folder: Path, checkpointing: bool, entropy_gradient: bool) -> PolicyModel:
    return load_policy(
        folder, "float64", TEMPERATURE, entropy_gradient=entropy_gradient, activation_checkpointing=checkpointing
    )


@cache
def model_of(folder: Path) -> torch.nn.Module:
    return dense.load(folder)


@cache
def reference_of(model: torch.nn.Module) -> torch.nn.Module:
    return scaled(model)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With tensors this small, more threads are slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drawn(groups: Groups, seed: int) -> tuple[list[BatchGroup], dict[str, SamplePayload]]:
    """The groups with random token ids, advantages and log-probs."""
    draw = np.random.default_rng(seed)
    payloads = {}
    members = []
    for number, (length, responses) in enumerate(groups):
        prompt = draw.integers(0, VOCABULARY, length, dtype=np.int32)
        samples = []
        for index, (tokens, masked) in enumerate(responses):
            key = f"{number}:{index}"
            answer, behaviour = draw.integers(0, VOCABULARY, tokens, dtype=np.int32), draw.normal(-4.5, 0.6, tokens)
            payloads[key] = SamplePayload(prompt, answer, behaviour.astype(np.float32), "", "stop", ())
            sample = BatchSample(
                payload=key,
                tokens=tokens,
                advantage=float(draw.normal()),
                reward=0.0,
                correct=False,
                masked=masked,
                staleness=0,
            )
            samples.append(sample)
        members.append(BatchGroup(group=f"g{number}", samples=tuple(samples), prompt_tokens=length))
    return members, payloads


def shuffled(groups: list[BatchGroup], seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    members = []
    for place in draw.permutation(len(groups)):
        group = groups[place]
        samples = tuple(group.samples[index] for index in draw.permutation(len(group.samples)))
        members.append(BatchGroup(group=group.group, samples=samples, prompt_tokens=group.prompt_tokens))
    return batch_with(members)


def accumulated(policy: PolicyModel, work: list[MicroBatch], settings: LossSettings, case: Case) -> Tensor:
    """The gradient of a mini-batch as a plain sum over micro-batches, without any engine: [parameters]."""
    reference = reference_of(policy) if settings.kl_coefficient else None
    policy.zero_grad()
    for batch in work:
        logprobs, entropy, _ = policy(**inputs(batch))
        before = batch.data.behaviour if case.algorithm.get("proximal") == "behaviour" else logprobs.detach()
        before = shifted(batch.data.behaviour) if case.given_proximal else before
        with torch.no_grad():
            anchor = None if reference is None else reference(**inputs(batch))[0]
        token_loss(logprobs, entropy, before, batch.data, settings, anchor).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


DRAWN = given(
    loss=st.sampled_from(sorted(LOSSES)),
    groups=GROUPS,
    seed=st.integers(0, 2**32 - 1),
    budget=st.integers(1, 150),
    ranks=st.integers(1, 3),
    share_prompts=st.booleans(),
    checkpointing=st.booleans(),
    chunk_tokens=st.integers(1, 40),
    fillers=st.integers(0, 2),
)
# The examples are small already, and shrinking one takes minutes.
PHASES = (Phase.explicit, Phase.generate)
any_cut = pytest.mark.conformance(
    formula="gradient = dL/dw of the mini-batch (float64: to 1e-10)",
    setting="any groups, masks, order, budget, layout, ranks, chunk_tokens, checkpointing",
)


@any_cut
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=20, phases=PHASES)
@DRAWN
def test_any_cut(small: Path, reduction: str, **example: Any) -> None:
    check_cut(small, reduction, **example)


@any_cut
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=40, phases=PHASES)
@DRAWN
def test_any_of_many_cuts(small: Path, reduction: str, **example: Any) -> None:
    check_cut(small, reduction, **example)


def check_cut(
    small: Path,
    reduction: str,
    loss: str,
    groups: Groups,
    seed: int,
    budget: int,
    ranks: int,
    share_prompts: bool,
    checkpointing: bool,
    chunk_tokens: int,
    fillers: int,
) -> None:
    case = replace(LOSSES[loss], algorithm={**LOSSES[loss].algorithm, "reduction": reduction})
    document = recipe(small, case)
    wanted = loss_settings(document)
    members, payloads = drawn(groups, seed)
    row_tokens, longest = longest_shared_row(budget, share_prompts=share_prompts), document.rollout.max_new_tokens
    (plan,) = plan_step(shuffled(members, seed), len(members), reduction, ranks, longest=longest, row_tokens=row_tokens)
    assume(plan.trainable)
    cut = [micro_batches(share, payloads, budget, share_prompts=share_prompts) for share in plan.shares]
    work = [batch for part in cut for batch in [*part, *[filler()] * fillers]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.algorithm.logprobs.CHUNK_TOKENS", chunk_tokens)
        found = accumulated(policy_of(small, checkpointing, wanted.entropy_coefficient > 0), work, wanted, case)
    model = model_of(small)
    model.zero_grad()
    reference = reference_of(model) if wanted.kl_coefficient else None
    dense.loss(model, members, payloads, document, proximal_of(case), reference).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    difference, norm = float((found - gradient).norm()), float(gradient.norm())
    print(f"{reduction}, {loss}: |dg| / |g| = {difference / norm if norm else 0.0:.1e}")
    assert difference <= 1e-10 * norm
