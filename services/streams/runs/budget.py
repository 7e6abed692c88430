"""Owns whether the budget of a run is spent: its money, or its GPU hours.

Must not end a run; the controller does.
"""

from __future__ import annotations

from services.settings import LimitsSettings, Prices
from services.settings.faults import invalid
from services.settings.operator.prices import NANO, VARIABLE
from services.streams.runs.ledger import COST, GPU_MS, Ledger

MS_PER_HOUR = 3_600_000


def spent_budget(limits: LimitsSettings, ledger: Ledger, prices: Prices | None) -> str | None:
    """Which budget of a run is spent, as one line with both numbers; None: none is.

    Without prices no money is spent. Only what was charged in the currency of the prices counts.
    """
    if limits.budget is not None and prices is not None:
        spent = ledger.total(COST, prices.currency) / NANO
        if spent >= limits.budget:
            return f"limits.budget: {_money(limits.budget)} {prices.currency} is spent ({_money(spent)})"
    if limits.gpu_hours is not None:
        hours = ledger.total(GPU_MS) / MS_PER_HOUR
        if hours >= limits.gpu_hours:
            return f"limits.gpu_hours: {limits.gpu_hours:g} GPU hours are spent ({hours:.4g})"
    return None


def _money(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.2g}"


def budget_faults(limits: LimitsSettings, prices: Prices | None) -> list[str]:
    """Why a platform with these prices cannot keep the budget of a recipe; one line per fault."""
    if limits.budget is None or prices is not None:
        return []
    return [invalid("limits.budget", limits.budget, f"null, because this platform states no prices ({VARIABLE})")]
