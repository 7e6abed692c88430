"""Owns the lengths of simulated responses: log-normal, with a long tail that the longest response cuts.

Must not draw anything else.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Lengths:
    """Response tokens: `median`, `spread` of the logarithm within a group, half of it between groups; `longest`."""

    median: float
    spread: float
    longest: int

    def draw(self, rng: random.Random, samples: int) -> tuple[int, ...]:
        """The lengths of a group's samples: 1 to `longest` tokens each."""
        median = self.median * rng.lognormvariate(0.0, self.spread / 2)
        return tuple(
            max(1, min(self.longest, round(median * rng.lognormvariate(0.0, self.spread)))) for _ in range(samples)
        )

    @property
    def mean(self) -> float:
        """The expected length E[min(X, c)] of a log-normal X = m exp(s Z), which is cut at c = `longest`.

        m exp(s^2 / 2) F(z - s) + c (1 - F(z)), with z = log(c / m) / s and F the normal distribution.
        """
        spread, normal = self.spread * math.sqrt(1.25), NormalDist()
        at = math.log(self.longest / self.median) / spread
        whole = self.median * math.exp(spread**2 / 2) * normal.cdf(at - spread)
        return whole + self.longest * (1 - normal.cdf(at))

    @property
    def cut(self) -> float:
        """The share of responses that are cut at `longest`."""
        return 1 - NormalDist().cdf(math.log(self.longest / self.median) / (self.spread * math.sqrt(1.25)))
