"""Owns the formula that each entry of REDUCTIONS stands for, as the conformance table shows it.

Must not check one.
"""

from __future__ import annotations

import pytest

from learner.algorithm.reductions import REDUCTIONS

FORMULAS = {
    "token": "sum over tokens / all tokens (DAPO 3.3, code)",
    "group_token": "mean over groups of sum / group's tokens (DAPO Eq. 8)",
    "sample": "mean over responses of 1/|o| sum (GRPO Eq. 3)",
    "sequence_sum": "mean over responses of sum",
    "constant_length": "mean over responses of sum / L (Dr. GRPO)",
}
REDUCED = [
    pytest.param(name, marks=pytest.mark.conformance(formula=FORMULAS[name], setting=f"reduction = {name}"))
    for name in REDUCTIONS
]
