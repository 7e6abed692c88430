"""Owns the formula of each entry of REDUCTIONS, as the conformance table shows it.

Must not check the formulas.
"""

from __future__ import annotations

import pytest

from learner.algorithm.reductions import REDUCTIONS

FORMULAS = {
    "token": "sum over all tokens / number of tokens (DAPO 3.3, code)",
    "group_token": "mean over groups of the group's token mean (DAPO Eq. 8)",
    "sample": "mean over responses of the response's token mean (GRPO Eq. 3)",
    "sequence_sum": "mean over responses of the sum over tokens",
    "constant_length": "mean over responses of the sum over tokens / L (Dr. GRPO)",
}
REDUCED = [
    pytest.param(name, marks=pytest.mark.conformance(formula=FORMULAS[name], setting=f"reduction = {name}"))
    for name in REDUCTIONS
]
