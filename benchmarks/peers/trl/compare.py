"""Owns the comparison with TRL: its loss and Penstock's, on the same numbers.

Must not copy TRL's formulas: it calls GRPOTrainer itself. Runs in an environment of its own; see README.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.trl.random_model import write_random_model
from learner.algorithm.logprobs import token_logprobs
from learner.algorithm.loss import LossSettings, TokenData, token_loss
from learner.algorithm.reductions import REDUCTIONS, SampleSize

TOLERANCE = 1e-5
RESPONSES, PROMPT, LONGEST, TEMPERATURE = 8, 5, 12, 0.7
LENGTHS = [1, 12, 3, 7, 12, 2, 5, 9]
PLAIN = LossSettings("clip_higher", 0.2, 0.28, None, "none", 2.0, 0.5, 5.0, 0.0, 0.0)


@dataclass(frozen=True)
class LossComparison:
    """One line of the table.

    equal: whether both losses are expected to agree. micro_batches: their sizes, in responses. masked: indices of
    responses. weighted_kl: TRL's use_bias_correction_kl, its default since DeepSeek-V3.2.
    """

    loss_type: str
    reduction: str
    settings: LossSettings = PLAIN
    micro_batches: tuple[int, ...] = (RESPONSES,)
    masked: tuple[int, ...] = ()
    weighted_kl: bool = False
    equal: bool = True
    remark: str = ""


PAIRS = {"dapo": "token", "bnpo": "token", "grpo": "sample", "dr_grpo": "constant_length"}
FULL = replace(PLAIN, dual_clip=2.0, kl_coefficient=0.1)
BONUS = replace(PLAIN, entropy_coefficient=0.02)
HALVES = (4, 4)
MEANS = "2 micro-batches: TRL averages their token means"
COUNTED = "TRL counts masked responses in its mean"
WEIGHTED = "TRL's default multiplies the KL by the ratio; GRPO Eq. 3 does not"
COMPARISONS = [
    *(LossComparison(name, reduction) for name, reduction in PAIRS.items()),
    *(LossComparison(name, reduction, FULL, remark="delta 2, beta 0.1") for name, reduction in PAIRS.items()),
    LossComparison("dapo", "token", FULL, HALVES, remark="2 micro-batches"),
    LossComparison("grpo", "sample", FULL, HALVES, remark="2 micro-batches"),
    LossComparison("dr_grpo", "constant_length", FULL, HALVES, remark="2 micro-batches"),
    LossComparison("bnpo", "token", FULL, HALVES, equal=False, remark=MEANS),
    LossComparison("dapo", "token", FULL, masked=(1, 4), remark="two responses masked"),
    LossComparison("bnpo", "token", FULL, masked=(1, 4), remark="two responses masked"),
    LossComparison("grpo", "sample", FULL, masked=(1, 4), equal=False, remark=COUNTED),
    LossComparison("dr_grpo", "constant_length", FULL, masked=(1, 4), equal=False, remark=COUNTED),
    LossComparison("grpo", "sample", FULL, weighted_kl=True, equal=False, remark=WEIGHTED),
    LossComparison("dapo", "token", BONUS, remark="entropy bonus 0.02"),
    LossComparison("grpo", "sample", BONUS, equal=False, remark="TRL's bonus is a mean over tokens"),
]


def numbers(masked: tuple[int, ...]) -> dict[str, Tensor]:
    """The inputs of TRL: prompts padded on the left, completions on the right, old log-probs off by half a nat."""
    draw = torch.Generator().manual_seed(5)
    prompt_mask = torch.ones(RESPONSES, PROMPT, dtype=torch.int64)
    prompt_mask[::2, :2] = 0
    lengths = torch.tensor(LENGTHS)
    present = (torch.arange(LONGEST) < lengths[:, None]).long()
    kept = present.clone()
    kept[list(masked)] = 0
    shape = (RESPONSES, LONGEST)
    return {
        "prompt_ids": torch.randint(7, 100, (RESPONSES, PROMPT), generator=draw) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(7, 100, shape, generator=draw) * present,
        "completion_mask": kept,
        "advantages": torch.randn(RESPONSES, generator=draw),
        "old_per_token_logps": 0.5 * torch.randn(shape, generator=draw),
        "ref_per_token_logps": 0.3 * torch.randn(shape, generator=draw),
        "num_items_in_batch": kept.sum(),
    }


def hidden_states(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The hidden states [RESPONSES, LONGEST, H] that predict the completions. Positions ignore padding, as in TRL."""
    ids = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
    mask = torch.cat([given["prompt_mask"], given["completion_mask"]], 1)
    states: Tensor = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return states[:, PROMPT - 1 : -1]


def penstock(folder: Path, comparison: LossComparison, given: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Penstock's loss and flat gradient, summed over micro-batches as the learner does."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kept = given["completion_mask"].bool()
    sizes = [SampleSize("g", tokens, index in comparison.masked) for index, tokens in enumerate(LENGTHS)]
    reduced = REDUCTIONS[comparison.reduction](sizes, LONGEST)
    weight = (torch.tensor(reduced.weights) / reduced.normaliser)[:, None].expand_as(kept)
    states, head = hidden_states(model, given), model.get_output_embeddings()
    total = 0.0
    loss = torch.zeros(())
    for rows in torch.split(torch.arange(RESPONSES), list(comparison.micro_batches)):
        where = kept[rows]
        asked = comparison.settings.entropy_coefficient > 0
        logprobs, entropy = token_logprobs(
            states[rows][where], given["completion_ids"][rows][where], head, TEMPERATURE, entropy_gradient=asked
        )
        sample = torch.arange(len(rows))[:, None].expand_as(where)[where]
        advantage = given["advantages"][rows][:, None].expand_as(where)[where]
        old = given["old_per_token_logps"][rows][where]
        reference = given["ref_per_token_logps"][rows][where] if comparison.settings.kl_coefficient else None
        data = TokenData(old, advantage, weight[rows][where], sample)
        found = token_loss(logprobs, entropy, old, data, comparison.settings, reference)
        total += float(found.loss.detach())
        loss = loss + found.loss
    torch.autograd.backward(loss)
    return total, _flat(model)


def trl(folder: Path, comparison: LossComparison, given: dict[str, Tensor]) -> tuple[float, Tensor]:
    """TRL's loss and flat gradient, accumulated over its micro-batches as Trainer does."""
    parts, settings = len(comparison.micro_batches), comparison.settings
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            loss_type=comparison.loss_type,
            epsilon=settings.clip_low,
            epsilon_high=settings.clip_high,
            delta=settings.dual_clip,
            beta=settings.kl_coefficient,
            entropy_coef=settings.entropy_coefficient,
            use_bias_correction_kl=comparison.weighted_kl,
            temperature=TEMPERATURE,
            max_completion_length=LONGEST,
            num_generations=4,
            per_device_train_batch_size=RESPONSES // parts,
            gradient_accumulation_steps=parts,
            steps_per_generation=parts,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["1"] * RESPONSES}),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = parts
        total = 0.0
        for rows in torch.split(torch.arange(RESPONSES), list(comparison.micro_batches)):
            inputs = {name: value if value.dim() == 0 else value[rows] for name, value in given.items()}
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
            total += float(loss.detach())
    return total, _flat(model)


def _flat(model: torch.nn.Module) -> Tensor:
    gradients = [parameter.grad for _, parameter in sorted(model.named_parameters())]
    return torch.cat([gradient.flatten().double() for gradient in gradients if gradient is not None])


def shifted(folder: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the model's own log-probs to the old and reference ones, so that ratios are on both sides of every bound."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = hidden_states(model, given)
        states, targets = states.reshape(-1, states.shape[-1]), given["completion_ids"].reshape(-1)
        flat, _ = token_logprobs(states, targets, model.get_output_embeddings(), TEMPERATURE)
    own = flat.reshape(RESPONSES, LONGEST)
    names = ("old_per_token_logps", "ref_per_token_logps")
    return given | {name: own + given[name] for name in names}


def main() -> int:
    """Print the table. Exit status 1 if a line is not as stated."""
    transformers_logging.disable_progress_bar()
    print(f"{'loss_type':<9} {'reduction':<16} {'TRL':>12} {'Penstock':>12} {'|dloss|':>9} {'|dg|/|g|':>9}  stated")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_model(Path(name), scale=0.2)
        for comparison in COMPARISONS:
            given = shifted(folder, numbers(comparison.masked))
            theirs, their_gradient = trl(folder, comparison, given)
            ours, our_gradient = penstock(folder, comparison, given)
            off = abs(theirs - ours) / max(abs(theirs), 1e-12)
            apart = float((their_gradient - our_gradient).norm() / their_gradient.norm())
            as_stated = max(off, apart) <= TOLERANCE if comparison.equal else apart > 100 * TOLERANCE
            wrong += not as_stated
            stated = ("equal" if comparison.equal else "differs") + ("" if as_stated else " NOT AS STATED")
            pair = f"{comparison.loss_type:<9} {comparison.reduction:<16}"
            differences = f"{theirs:>12.8f} {ours:>12.8f} {off:>9.1e} {apart:>9.1e}"
            print(f"{pair} {differences}  {stated}; {comparison.remark}", flush=True)
    print(f"{len(COMPARISONS) - wrong} of {len(COMPARISONS)} as stated (tolerance {TOLERANCE:g})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
