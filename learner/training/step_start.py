"""Owns what the losses of a rollout step compare with: log-probs and values before its first optimizer step.

Must not change the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learner.algorithm.values import ValueTerm
from learner.training.minibatches import MicroBatch
from learner.training.network.policy import PolicyOutput, inputs
from learner.training.token_advantages import with_advantages
from services.settings import AlgorithmSettings

Work = list[list[MicroBatch]]
"""A rank's micro-batches of a rollout step, by optimizer step."""


class Anchor(NamedTuple):
    """What the loss of a micro-batch compares with, [N] each, without gradient.

    proximal: None where the policy at that time is the proximal one. reference: only with a KL term. values: those at
    the start of the rollout step, and returns: only with a value head.
    """

    proximal: Tensor | None
    reference: Tensor | None
    values: Tensor | None = None
    returns: Tensor | None = None

    def value_term(self, output: PolicyOutput) -> ValueTerm | None:
        """The input of the value loss for the `output` of this micro-batch; None without a value head."""
        if output.values is None or self.values is None or self.returns is None:
            return None
        return ValueTerm(output.values, self.values, self.returns)


class StepStart:
    """The forward passes before the optimizer steps. Collective: all ranks run the same number of micro-batches."""

    def __init__(
        self,
        policy: Any,
        reference: Any,
        algorithm: AlgorithmSettings,
        before_each: Callable[[], None],
        all_reduce: Callable[[Tensor], Tensor],
        *,
        short_cut: bool,
    ) -> None:
        """`policy`, `reference` (or None): the networks. `before_each`: called before each pass; it may raise.

        `all_reduce` adds up a CPU tensor over all ranks. `short_cut`: in the first optimizer step, the log-probs of its
        own pass are the proximal ones.
        """
        self._policy = policy
        self._reference = reference
        self._behaviour_is_proximal = algorithm.proximal == "behaviour"
        self._value = algorithm.value if algorithm.advantage == "gae" else None
        self._before_each = before_each
        self._all_reduce = all_reduce
        self._short_cut = short_cut

    def anchors(self, work: Work) -> tuple[Work, list[list[Anchor]]]:
        """What the losses of the rollout step compare with, per optimizer step and micro-batch; and the work.

        With a value head, the advantages of the work are replaced by GAE's.
        """
        reference = self._reference_logprobs(work)
        if self._value is None:
            proximal = self._proximal(work)
            return work, [
                [Anchor(*logprobs) for logprobs in zip(*parts, strict=True)]
                for parts in zip(proximal, reference, strict=True)
            ]
        # All values are needed before the first optimizer step; the same pass gives the proximal log-probs.
        before = [self._outputs(self._policy, part) for part in work]
        proximal = self._proximal(work, [[output.logprobs for output in part] for part in before])
        values = [[output.values for output in part if output.values is not None] for part in before]
        work, returns = with_advantages(work, values, self._value, self._all_reduce)
        return work, [
            [Anchor(*found) for found in zip(*parts, strict=True)]
            for parts in zip(proximal, reference, values, returns, strict=True)
        ]

    def _proximal(self, work: Work, known: list[list[Tensor]] | None = None) -> list[list[Tensor | None]]:
        """The proximal log-probs [N] per optimizer step and micro-batch. None: those of the policy at that time.

        `known`: the policy's at the start of the rollout step, where they were computed already.
        """
        if self._behaviour_is_proximal:
            return [[batch.data.behaviour for batch in part] for part in work]
        if known is not None:
            return [list(part) for part in known]
        # In the first optimizer step, the current policy is the proximal one, so its log-probs serve as both.
        fresh = 1 if self._short_cut else 0
        return [*_nothing(work[:fresh]), *(self._logprobs(self._policy, part) for part in work[fresh:])]

    def _reference_logprobs(self, work: Work) -> list[list[Tensor | None]]:
        if self._reference is None:
            return _nothing(work)
        return [self._logprobs(self._reference, part) for part in work]

    def _logprobs(self, model: Any, part: list[MicroBatch]) -> list[Tensor | None]:
        return [output.logprobs for output in self._outputs(model, part)]

    @torch.no_grad()
    def _outputs(self, model: Any, part: list[MicroBatch]) -> list[PolicyOutput]:
        found: list[PolicyOutput] = []
        for batch in part:
            self._before_each()
            found.append(model(**inputs(batch)))
        return found


def _nothing(work: Work) -> list[list[Tensor | None]]:
    return [[None] * len(part) for part in work]
