"""Owns the models of the ledger: tokens, seconds and money of a run or of a project, by what they were used for.

Must not compute a share.
"""

from __future__ import annotations

from pydantic import Field

from penstock_client.models.base import ApiModel


class LedgerLine(ApiModel):
    """One use, such as `trained` or `idle`: response tokens, seconds of GPUs and of CPUs, money.

    `share`: of the GPU-seconds, or of the CPU-seconds where no GPU was used. `cost`: None without prices.
    """

    use: str
    tokens: int = 0
    share: float = 0.0
    gpu_seconds: float = 0.0
    cpu_seconds: float = 0.0
    cost: float | None = None


class LedgerSum(ApiModel):
    """What was used in all; `tokens`: by use, and `generated`."""

    tokens: dict[str, int] = Field(default_factory=dict)
    gpu_seconds: float = 0.0
    cpu_seconds: float = 0.0
    cost: float | None = None
    rows: list[LedgerLine] = Field(default_factory=list)


class HourPrices(ApiModel):
    """Prices of an hour, in the currency of the ledger."""

    gpu_hour: float = 0.0
    cpu_hour: float = 0.0


class LedgerOfRun(LedgerSum):
    """The ledger of a run. `closes`: whether each generated token is in exactly one row.

    `budget`: the most that it may cost, `gpu_hours_limit`: the most hours of GPUs; None: no limit. `since`: Unix
    seconds, None before the first account.
    """

    run: str
    project: str = ""
    closes: bool = True
    currency: str | None = None
    prices: HourPrices | None = None
    budget: float | None = None
    gpu_hours_limit: float | None = None
    since: float | None = None


class LedgerOfProject(LedgerSum):
    """The ledger of a project, with that of its deleted runs."""

    project: str
    runs: int | None = None


class LedgerOfPlatform(ApiModel):
    """The ledgers of the projects that are visible to who asks."""

    currency: str | None = None
    projects: list[LedgerOfProject]
