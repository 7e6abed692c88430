"""Owns the rows of a ledger: how charged seconds and money are attributed to uses.

Must not read Redis. The rule is in docs/operations/costs.md: a service that handles responses is attributed by their
tokens, the learner to what was trained, and what was idle to nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.settings.operator.prices import NANO
from services.streams.runs.ledger import (
    BUSY,
    COST,
    CPU_MS,
    GPU_MS,
    IDLE,
    IN_FLIGHT,
    TOKEN_USES,
    Ledger,
)

USES = (*TOKEN_USES, IDLE)
"""What GPUs and CPUs were used for, in the order of the rows."""
LEARNER, TRAINED = "learner", "trained"
MS = 1000
"""Milliseconds of a second."""


@dataclass(frozen=True)
class UseRow:
    """What one use took. `cost`: billionths of the currency; None without one. `share`: of the GPU time, else CPU."""

    use: str
    tokens: int
    share: float
    gpu_ms: int
    cpu_ms: int
    cost: int | None


def rows_of(ledger: Ledger, currency: str | None) -> list[UseRow]:
    """One row per use, whose sums are exactly the totals of the ledger. `currency`: of the costs; None: without."""
    gpu, cpu = _by_use(ledger, GPU_MS), _by_use(ledger, CPU_MS)
    cost = _by_use(ledger, COST, currency) if currency else None
    parts = gpu if any(gpu.values()) else cpu
    whole = sum(parts.values())
    return [
        UseRow(
            use=use,
            tokens=ledger.tokens.get(use, 0),
            share=parts[use] / whole if whole else 0.0,
            gpu_ms=gpu[use],
            cpu_ms=cpu[use],
            cost=None if cost is None else cost[use],
        )
        for use in USES
    ]


def _by_use(ledger: Ledger, what: str, currency: str = "") -> Counter[str]:
    found: Counter[str] = Counter()
    for field, amount in ledger.charged.items():
        service, condition, kind, *unit = field.split(".")
        if kind != what or unit != ([currency] if currency else []):
            continue
        if condition != BUSY:
            found[IDLE] += amount
        elif service == LEARNER:
            found[TRAINED] += amount
        else:
            found.update(divided(amount, ledger.tokens))
    return found


def divided(amount: int, tokens: Mapping[str, int]) -> dict[str, int]:
    """An amount in whole parts, in the proportion of the tokens of each use; all of it in flight without tokens.

    The parts sum to the amount: each ends at its rounded place on the whole.
    """
    weights = {use: max(0, tokens.get(use, 0)) for use in TOKEN_USES}
    whole = sum(weights.values())
    if not whole:
        return {IN_FLIGHT: amount}
    parts, reached, before = {}, 0, 0
    for use, weight in weights.items():
        reached += weight
        end = amount * reached // whole
        parts[use], before = end - before, end
    return parts


def ledger_document(ledger: Ledger, currency: str | None = None) -> dict[str, Any]:
    """A ledger for readers: tokens, seconds and money, as totals and by use.

    `currency`: of the costs; None: the one in which something was charged, if it is the only one.
    """
    if currency is None and len(ledger.currencies) == 1:
        [currency] = ledger.currencies
    return {
        "currency": currency,
        "tokens": dict(ledger.tokens),
        "gpu_seconds": ledger.total(GPU_MS) / MS,
        "cpu_seconds": ledger.total(CPU_MS) / MS,
        "cost": ledger.total(COST, currency) / NANO if currency else None,
        "rows": [
            {
                "use": row.use,
                "tokens": row.tokens,
                "share": row.share,
                "gpu_seconds": row.gpu_ms / MS,
                "cpu_seconds": row.cpu_ms / MS,
                "cost": None if row.cost is None else row.cost / NANO,
            }
            for row in rows_of(ledger, currency)
        ],
    }
