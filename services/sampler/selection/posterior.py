"""Owns what is known of each prompt's pass rate: a Beta posterior whose evidence fades as the policy changes.

Must not draw prompts, nor do I/O.
"""

from __future__ import annotations

import base64
import binascii
import math
import random
import struct
from collections.abc import Mapping
from typing import NamedTuple

LAYOUT = struct.Struct("<ffI")
"""A prompt's evidence: correct and wrong answers above the prior (float32), as of which policy version (uint32)."""


def mixed(pass_rate: float, size: int) -> float:
    """1 - p^size - (1-p)^size: that `size` answers are neither all right nor all wrong, at a known pass rate p."""
    rarer = min(pass_rate, 1.0 - pass_rate)
    if rarer <= 0.0:
        return 0.0
    # expm1 keeps its digits where the rate is next to 0 or 1.
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
        """1 - E[p^size] - E[(1-p)^size]: that a group of `size` samples carries a signal, whatever p turns out to be.

        The beta-binomial's mass strictly between 0 and `size` (J. G. Skellam, J. R. Stat. Soc. B 10, 1948).
        """
        return max(0.0, 1.0 - _moment(self.alpha, self.beta, size) - _moment(self.beta, self.alpha, size))

    def draw(self, rng: random.Random) -> float:
        """One pass rate at random."""
        return rng.betavariate(self.alpha, self.beta)


FLAT = Beta(1.0, 1.0)
"""Every pass rate is as likely as any other."""


def _moment(alpha: float, beta: float, power: int) -> float:
    """E[p^n] = B(alpha + n, beta) / B(alpha, beta), with B(x, y) = G(x) G(y) / G(x + y) (DLMF 5.12.1)."""
    ratio = math.lgamma(alpha + power) - math.lgamma(alpha)
    return math.exp(ratio - math.lgamma(alpha + beta + power) + math.lgamma(alpha + beta))


class PassRates:
    """One posterior for each prompt that was judged; the others have the prior.

    Evidence halves every `half_life` policy versions, so that what an old policy could not do is forgotten: a Beta
    posterior with discounted evidence, as in MoPPS (arXiv 2507.04632). A judged prompt takes 12 bytes of state, which
    `dump` writes as 16 characters; what is dumped is what is held, bit for bit.
    """

    def __init__(self, half_life: float, prior: Beta = FLAT) -> None:
        if not half_life > 0:
            raise ValueError(f"half_life: {half_life} is not valid: expected a number of policy versions above 0")
        if not (prior.alpha > 0 and prior.beta > 0):
            raise ValueError(f"prior: {prior} is not valid: expected two numbers above 0")
        self._half_life = half_life
        self._prior = prior
        self._entries: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def observe(self, prompt: str, correct: int, known: int, version: int) -> None:
        """Take in `correct` of `known` answers by policy `version`; unknown verdicts say nothing.

        Answers may come in any order of versions, and a group in parts: a screen may be told before the rest, since the
        evidence does not depend on why sampling stopped.
        """
        if not 0 <= correct <= known:
            raise ValueError(f"prompt {prompt!r}: correct = {correct} must lie between 0 and known = {known}")
        if known == 0:
            return
        right, wrong, newest = self._evidence(prompt, version)
        fresh = self._left(newest - version)
        self._entries[prompt] = LAYOUT.pack(right + fresh * correct, wrong + fresh * (known - correct), newest)

    def of(self, prompt: str, version: int) -> Beta:
        """What is believed of a prompt's pass rate under policy `version`."""
        right, wrong, _ = self._evidence(prompt, version)
        return Beta(self._prior.alpha + right, self._prior.beta + wrong)

    def _evidence(self, prompt: str, version: int) -> tuple[float, float, int]:
        """Right and wrong answers as of policy `version`, or as of the newest that was observed if that is newer."""
        entry = self._entries.get(prompt)
        if entry is None:
            return 0.0, 0.0, version
        right, wrong, observed = LAYOUT.unpack(entry)
        left = self._left(version - observed)
        return right * left, wrong * left, max(version, observed)

    def _left(self, versions: int) -> float:
        """The share of evidence left after so many versions; all of it where there are none between."""
        return float(0.5 ** (max(0, versions) / self._half_life))

    def entry(self, prompt: str) -> str:
        """The state of one judged prompt, as `dump` has it: enough to store what one group has changed."""
        return base64.b64encode(self._entries[prompt]).decode()

    def dump(self) -> dict[str, str]:
        """The whole state, by prompt id: 16 characters for each prompt that was judged."""
        return {prompt: self.entry(prompt) for prompt in self._entries}

    def load(self, dumped: Mapping[str, str]) -> None:
        """Take `dumped` in place of what is known. Raises ValueError for what `dump` cannot have written."""
        self._entries = {prompt: _entry(prompt, text) for prompt, text in dumped.items()}


def _entry(prompt: str, text: str) -> bytes:
    try:
        entry = base64.b64decode(text, validate=True)
        right, wrong, _ = LAYOUT.unpack(entry)
    except (binascii.Error, struct.error) as error:
        raise ValueError(
            f"prompt {prompt!r}: {text!r} is not valid: expected a pass rate of 16 base64 characters"
        ) from error
    if not (0 <= right < math.inf and 0 <= wrong < math.inf):
        raise ValueError(f"prompt {prompt!r}: {right} right and {wrong} wrong is not valid: expected numbers from 0")
    return entry
