"""Owns the loop that the learner is measured beside: Hugging Face's model, rows padded on the right, full logits.

Must not share prompts, sort by length, or cut the logits: it is what one writes with transformers and torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.learner.step.workload import Work
from learner.algorithm.loss import TokenData, token_loss
from learner.training.minibatches import plan_step
from learner.training.shares import PlannedSample
from learner.training.trainer import loss_settings
from services.contracts import Batch
from services.settings import Recipe
from services.streams.delivery.payloads import SamplePayload


class PaddedLoop:
    """Trains the same rollout steps as the learner, with the same loss and the same AdamW."""

    def __init__(self, folder: Path, recipe: Recipe, work: Work) -> None:
        """Load the model in float32. A micro-batch has `work.rows` responses, in the order of the batch."""
        self._recipe, self._rows = recipe, work.rows
        self._loss, learner = loss_settings(recipe), recipe.learner
        torch.set_num_threads(learner.threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model.train()
        rate, decay = learner.learning_rate, learner.weight_decay
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=decay, fused=True)

    def train(self, batch: Batch, payloads: dict[str, SamplePayload]) -> list[tuple[float, float]]:
        """One optimizer step per mini-batch. Returns the loss and the gradient's norm before clipping, of each.

        `payloads`: in the order in which the responses are cut into micro-batches.
        """
        settings = self._recipe.learner
        reduction, longest = self._recipe.algorithm.reduction, self._recipe.rollout.max_new_tokens
        plans = plan_step(batch, settings.mini_batch_groups, reduction, 1, longest=longest, row_tokens=0)
        place = {payload: at for at, payload in enumerate(payloads)}
        # A plan's share begins with the longest responses: sorted by length, a padded loop would hardly pad.
        work = [self._cut(sorted(plan.shares[0], key=lambda row: place[row.payload])) for plan in plans]
        # Those of the policy at the start; in the first optimizer step its own pass gives them.
        with torch.no_grad():
            before: list[list[Tensor | None]] = [[self._logprobs(rows, payloads) for rows in part] for part in work[1:]]
        proximal: list[list[Tensor | None]] = [[None] * len(work[0]), *before]
        return [self._optimizer_step(part, payloads, found) for part, found in zip(work, proximal, strict=True)]

    def _cut(self, share: Sequence[PlannedSample]) -> list[Sequence[PlannedSample]]:
        return [share[start : start + self._rows] for start in range(0, len(share), self._rows)]

    def _optimizer_step(
        self,
        part: Sequence[Sequence[PlannedSample]],
        payloads: dict[str, SamplePayload],
        proximal: Sequence[Tensor | None],
    ) -> tuple[float, float]:
        total = 0.0
        for rows, before in zip(part, proximal, strict=True):
            logprobs = self._logprobs(rows, payloads)
            current = logprobs.detach()
            old = current if before is None else before
            found = token_loss(logprobs, torch.zeros_like(current), old, _data(rows, payloads), self._loss)
            torch.autograd.backward(found.loss)
            total += found.loss.item()
        clip = self._recipe.learner.gradient_clip
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def _logprobs(self, rows: Sequence[PlannedSample], payloads: dict[str, SamplePayload]) -> Tensor:
        """The log-probs [N] of the rows' response tokens."""
        given = [payloads[row.payload] for row in rows]
        width = max(len(payload.prompt_ids) + len(payload.response_ids) for payload in given) - 1
        ids = torch.zeros((len(given), width), dtype=torch.int64)
        mask, targets, trained = torch.zeros_like(ids), torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool)
        for row, payload in enumerate(given):
            prompt, response = map(torch.from_numpy, (payload.prompt_ids, payload.response_ids))
            whole, start = torch.cat([prompt, response]).long(), len(prompt) - 1
            end = len(whole) - 1
            ids[row, :end], targets[row, :end] = whole[:-1], whole[1:]
            mask[row, :end], trained[row, start:end] = 1, True
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = torch.log_softmax(logits / self._recipe.rollout.temperature, -1)
        return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[trained]


def _data(rows: Sequence[PlannedSample], payloads: dict[str, SamplePayload]) -> TokenData:
    tokens = torch.tensor([row.tokens for row in rows])
    advantage, weight = torch.tensor([(row.advantage, row.weight) for row in rows]).repeat_interleave(tokens, 0).T
    behaviour = torch.cat([torch.from_numpy(payloads[row.payload].behaviour_logprobs) for row in rows])
    return TokenData(behaviour, advantage, weight, torch.arange(len(rows)).repeat_interleave(tokens))
