"""Owns how long a run that failed or was cancelled can be resumed, as the operator sets it for all runs.

Must not know what expires; the controller does.
"""

from __future__ import annotations

import math
import os

from services.settings.faults import invalid

VARIABLE = "PENSTOCK_EXPIRE_ENDED_S"
DEFAULT_S = 14 * 24 * 3600.0


class ExpiryError(ValueError):
    """The value of PENSTOCK_EXPIRE_ENDED_S cannot be used; one line."""


def load_expiry() -> float | None:
    """Seconds after its end at which such a run expires; None: never. Raises ExpiryError."""
    text = os.environ.get(VARIABLE) or str(DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ExpiryError(invalid(VARIABLE, text, "a number of seconds; 0: runs never expire"))
    return seconds or None
