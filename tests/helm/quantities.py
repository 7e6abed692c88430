"""Owns parsing of Kubernetes quantities.

Must not accept what an API server would reject.
"""

from __future__ import annotations

import re

_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
}


def quantity(value: str | int | float) -> float:
    """Parse a quantity into a number: cores, bytes, pieces. Raises ValueError for any other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi|)", str(value))
    if not match:
        raise ValueError(f"{value!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2]]
