"""Rows that lie end to end: the same log-probs and gradients as each response has in a row of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, MistralConfig

from learner.training.minibatches import micro_batches
from learner.training.network.policy import PolicyModel, can_share_prompts, inputs, load_policy
from learner.training.shares import PlannedSample
from services.streams.delivery.payloads import SamplePayload
from tests.learner.architectures import READ_DIRECTLY, write_model

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]
WORDS = 40
GROUPS = [(9, [7, 1, 12]), (30, [4]), (3, [25, 2])]
"""The tokens of each group's prompt, and of its responses."""


def drawn() -> tuple[list[PlannedSample], dict[str, SamplePayload]]:
    """The groups' responses; the advantage of each is its number, from 1 on."""
    draw, share, payloads = np.random.default_rng(3), list[PlannedSample](), {}
    for prompt, responses in GROUPS:
        ids = draw.integers(0, WORDS, prompt, dtype=np.int32)
        for tokens in responses:
            key, response = str(len(share)), draw.integers(0, WORDS, tokens, dtype=np.int32)
            payloads[key] = SamplePayload(ids, response, np.zeros(tokens, np.float32), "", "stop", ())
            share.append(PlannedSample(key, f"g{prompt}", tokens, len(share) + 1.0, 1.0))
    return share, payloads


def passed(policy: PolicyModel, shares: Sequence[list[PlannedSample]], *, shared: bool) -> tuple[Tensor, list[Tensor]]:
    """The log-probs of all responses, in their order, and the gradient of their sum, weighted with the advantages."""
    _, payloads = drawn()
    policy.zero_grad()
    found = []
    for share in shares:
        for part in micro_batches(share, payloads, 4096, share_prompts=shared):
            logprobs = policy(**inputs(part.to(torch.device("cpu"), torch.float64))).logprobs
            (logprobs * part.data.advantage).sum().backward()
            found.append(torch.stack([part.data.advantage, logprobs.detach()]))
    advantages, logprobs = torch.cat(found, dim=1)
    order = advantages.argsort(stable=True)
    return logprobs[order], [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", [name for name in READ_DIRECTLY if name != "gemma2"])  # its head is no product
def test_rows_end_to_end_change_nothing(name: str, checkpointed: bool, tmp_path: Path) -> None:
    """With prompts longer and shorter than Mistral's window of 8 tokens."""
    folder = write_model(tmp_path, READ_DIRECTLY[name], torch.float64)
    policy = load_policy(folder, "float64", 0.8, activation_checkpointing=checkpointed)
    assert can_share_prompts(policy)
    share, _ = drawn()
    alone, gradients = passed(policy, [[sample] for sample in share], shared=False)
    together, same_gradients = passed(policy, [share], shared=True)
    assert len(alone) == sum(sum(responses) for _, responses in GROUPS)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    assert len(gradients) == len(same_gradients)
    for given, wanted in zip(same_gradients, gradients, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-7, atol=1e-7)


def test_padded_rows_attend_as_before(tmp_path: Path) -> None:
    """After rows end to end, and with a window: the attention of padded rows is that of transformers."""
    folder = write_model(tmp_path, READ_DIRECTLY["mistral"], torch.float32)
    policy, (share, payloads) = load_policy(folder, "float32", 1.0), drawn()
    for shared in (True, False):
        [batch] = micro_batches(share, payloads, 4096, share_prompts=shared)
        with torch.no_grad():
            found = policy(**inputs(batch)).logprobs
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        logits = own(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.source]
    wanted = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_recurrent_model_does_not_share_prompts() -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.5)
    assert not can_share_prompts(PolicyModel(MambaForCausalLM(config).eval(), 1.0))


def test_a_window_that_a_layer_does_not_pass_on_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published window is longer than the few tokens that show the other differences."""
    config = MistralConfig(**{**READ_DIRECTLY["mistral"].to_dict(), "sliding_window": 50})
    policy = load_policy(write_model(tmp_path, config, torch.float32), "float32", 1.0)
    assert can_share_prompts(policy)
    monkeypatch.setattr(
        "learner.training.network.attention._in_window",
        lambda new, total, *_: torch.ones(new, total).tril(total - new).bool(),
    )
    assert not can_share_prompts(policy)


def test_a_window_that_is_too_long_to_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.training.network.policy.PROBED_WINDOW", 7)
    folder = write_model(tmp_path, READ_DIRECTLY["mistral"], torch.float32)
    assert not can_share_prompts(load_policy(folder, "float32", 1.0))
