"""Owns how ledgers are shown: of a run, and of projects.

Must not read Redis.
"""

from __future__ import annotations

from pydantic import BaseModel


class TokensView(BaseModel):
    """Response tokens: those generated, and each of their uses."""

    generated: int
    trained: int
    filtered: int
    stale: int
    dead: int
    evaluated: int
    discarded: int
    in_flight: int


class UsedView(BaseModel):
    """What one use took: one of the uses of tokens, or `idle`.

    `share`: of the GPU time, or of the CPU time if there is none. `cost`: null without prices.
    """

    use: str
    tokens: int
    share: float
    gpu_seconds: float
    cpu_seconds: float
    cost: float | None


class SpentView(BaseModel):
    """What was used: `rows` by use, which sum to the totals. `closes`: each generated token has exactly one use.

    `currency` of `cost`: null if neither prices are set, nor anything was charged in one currency alone.
    """

    closes: bool
    currency: str | None
    tokens: TokensView
    gpu_seconds: float
    cpu_seconds: float
    cost: float | None
    rows: list[UsedView]


class PricesView(BaseModel):
    """What a GPU and a CPU cost per hour now."""

    gpu_hour: float
    cpu_hour: float


class RunLedger(SpentView):
    """What a run used, and its budget. `since`: Unix seconds of its first account; null before it.

    Tokens that were generated under a release without ledgers are in none of the numbers.
    """

    run: str
    project: str
    prices: PricesView | None
    budget: float | None
    gpu_hours_limit: float | None
    since: float | None


class ProjectLedger(SpentView):
    """What all runs of a project used, also those that were deleted. `runs`: how many it has now, in any state."""

    project: str
    runs: int | None


class PlatformLedger(BaseModel):
    """The ledgers of the projects that are visible to you, by name. `currency`: of the prices; null without prices."""

    currency: str | None
    projects: list[ProjectLedger]
