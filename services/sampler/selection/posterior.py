"""Owns the estimate of each prompt's pass rate: a Beta posterior whose evidence fades as the policy changes.

Must not draw prompts, or do I/O.
"""

from __future__ import annotations

import base64
import binascii
import math
import random
import struct
from collections.abc import Mapping
from typing import NamedTuple

EVIDENCE = struct.Struct("<ffI")
"""The stored evidence on a prompt: correct and wrong answers without the prior (float32), rollout step (uint32)."""


def mixed(pass_rate: float, size: int) -> float:
    """1 - p^size - (1-p)^size: the chance that `size` answers are neither all right nor all wrong, at a pass rate p."""
    rarer = min(pass_rate, 1.0 - pass_rate)
    if rarer <= 0.0:
        return 0.0
    # expm1 stays precise where the rate is close to 0 or 1.
    return max(0.0, -math.expm1(size * math.log1p(-rarer)) - rarer**size)


class Beta(NamedTuple):
    """A distribution of the pass rate p, with density proportional to p^(alpha-1) (1-p)^(beta-1)."""

    alpha: float
    beta: float

    @property
    def mean(self) -> float:
        """The expected pass rate."""
        return self.alpha / (self.alpha + self.beta)

    def mixed(self, size: int) -> float:
        """1 - E[p^size] - E[(1-p)^size]: the chance that a group of `size` samples carries a signal, over all p.

        The beta-binomial's mass strictly between 0 and `size` (J. G. Skellam, J. R. Stat. Soc. B 10, 1948).
        """
        return max(0.0, 1.0 - _moment(self.alpha, self.beta, size) - _moment(self.beta, self.alpha, size))

    def draw(self, rng: random.Random) -> float:
        """A random pass rate of this distribution."""
        return rng.betavariate(self.alpha, self.beta)


FLAT = Beta(1.0, 1.0)
"""Every pass rate is as likely as any other."""


def _moment(alpha: float, beta: float, power: int) -> float:
    """E[p^n] = B(alpha + n, beta) / B(alpha, beta), with B(x, y) = G(x) G(y) / G(x + y) (DLMF 5.12.1)."""
    ratio = math.lgamma(alpha + power) - math.lgamma(alpha)
    return math.exp(ratio - math.lgamma(alpha + beta + power) + math.lgamma(alpha + beta))


class PassRates:
    """One posterior per judged prompt; the other prompts have the prior.

    Evidence halves every `half_life` rollout steps, so that the failures of an old policy fade: a Beta posterior with
    discounted evidence, as in MoPPS (arXiv 2507.04632). The state of a judged prompt takes 12 bytes, which `dump`
    writes as 16 characters, bit for bit.
    """

    def __init__(self, half_life: float, prior: Beta = FLAT) -> None:
        self._half_life = half_life
        self._prior = prior
        self._entries: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def observe(self, prompt: str, correct: int, known: int, step: int) -> None:
        """Add `correct` of `known` answers by the policy of rollout step `step`. Unknown verdicts are no evidence.

        Steps may come in any order. A group may be added in parts, such as a screen and the other samples, because
        the evidence does not depend on why sampling stopped. Raises ValueError unless 0 <= correct <= known.
        """
        if not 0 <= correct <= known:
            raise ValueError(f"prompt {prompt!r}: correct: {correct} is not valid: expected 0 to {known} (known)")
        if known == 0:
            return
        right, wrong, newest = self._evidence(prompt, step)
        fresh = self._left(newest - step)
        self._entries[prompt] = EVIDENCE.pack(right + fresh * correct, wrong + fresh * (known - correct), newest)

    def of(self, prompt: str, step: int) -> Beta:
        """The posterior of a prompt's pass rate under the policy of rollout step `step`."""
        right, wrong, _ = self._evidence(prompt, step)
        return Beta(self._prior.alpha + right, self._prior.beta + wrong)

    def _evidence(self, prompt: str, step: int) -> tuple[float, float, int]:
        """Discounted right and wrong answers, and their step: the later of `step` and the last observed one."""
        entry = self._entries.get(prompt)
        if entry is None:
            return 0.0, 0.0, step
        right, wrong, observed = EVIDENCE.unpack(entry)
        left = self._left(step - observed)
        return right * left, wrong * left, max(step, observed)

    def _left(self, steps: int) -> float:
        """The share of evidence that is left after a number of rollout steps; 1 for 0 or fewer."""
        return float(0.5 ** (max(0, steps) / self._half_life))

    def entry(self, prompt: str) -> str:
        """The state of one judged prompt in the form of `dump`, to store the change by one group."""
        return base64.b64encode(self._entries[prompt]).decode()

    def dump(self) -> dict[str, str]:
        """The whole state by prompt id: 16 characters per judged prompt."""
        return {prompt: self.entry(prompt) for prompt in self._entries}

    def load(self, dumped: Mapping[str, str], newest_step: int) -> None:
        """Replace the whole state by `dumped`. Evidence of a later step than `newest_step` counts as evidence of that.

        Raises ValueError for an entry that `dump` cannot have written.
        """
        self._entries = {prompt: _entry(prompt, text, newest_step) for prompt, text in dumped.items()}


def _entry(prompt: str, text: str, newest_step: int) -> bytes:
    try:
        right, wrong, step = EVIDENCE.unpack(base64.b64decode(text, validate=True))
    except (binascii.Error, struct.error) as error:
        raise ValueError(
            f"prompt {prompt!r}: {text!r} is not valid: expected a pass rate of 16 base64 characters"
        ) from error
    if not (0 <= right < math.inf and 0 <= wrong < math.inf):
        raise ValueError(f"prompt {prompt!r}: {right} right and {wrong} wrong is not valid: expected numbers from 0")
    # Earlier releases stored the policy version, which is at least its step. Without the limit, what is observed next
    # would count as old beside it.
    return EVIDENCE.pack(right, wrong, min(step, newest_step))
