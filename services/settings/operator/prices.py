"""Owns the prices of a platform's GPUs and CPUs, as the operator sets them.

Must not know what a run used.
"""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field, ValidationError

from services.settings.base import Section
from services.settings.faults import explained, invalid

VARIABLE = "PENSTOCK_PRICES"
EXPECTED = 'a JSON object such as {"currency": "USD", "gpu_hour": 2.5, "cpu_hour": 0.04}'
NANO = 10**9
"""Money is counted in whole billionths of the currency, so that sums are exact."""
Price = Annotated[float, Field(ge=0, le=1e6)]


class PricesError(ValueError):
    """The value of PENSTOCK_PRICES cannot be used; one line per fault."""


class Prices(Section):
    """What one GPU and one CPU cost per hour that a process reserves them. `currency`: its ISO 4217 code."""

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    gpu_hour: Price = 0.0
    cpu_hour: Price = 0.0

    def cost(self, gpu_ms: int, cpu_ms: int) -> int:
        """What milliseconds of a GPU and of a CPU cost, in billionths of the currency."""
        return round((gpu_ms * self.gpu_hour + cpu_ms * self.cpu_hour) * NANO / 3_600_000)


def load_prices() -> Prices | None:
    """The prices that the environment states; None: none. Raises PricesError."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return Prices.model_validate_json(text)
    except ValidationError as error:
        lines = [_line(text, dict(fault)) for fault in error.errors()]
        raise PricesError("\n".join(lines)) from None


def _line(text: str, fault: dict[str, object]) -> str:
    where = fault["loc"]
    if not isinstance(where, tuple) or not where:
        return invalid(VARIABLE, text[:200], EXPECTED)
    return explained(f"{VARIABLE}: {'.'.join(map(str, where))}", fault)[:500]
