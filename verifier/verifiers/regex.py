"""Owns the verdict by pattern: whether a response matches a regular expression.

Must not limit its own time; the sandbox does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verifier.verifiers.base import Judgement


def judge(text: str, reference: Mapping[str, Any], options: Mapping[str, Any]) -> Judgement:
    """`reference` holds `pattern`; correct iff it is found in the response. The answer is the match."""
    found = re.search(reference["pattern"], text)
    correct = found is not None
    answer = found.group() if found else ""
    reason = f"the pattern matches {answer[:100]!r}" if found else "the pattern matches nothing"
    return Judgement(correct=correct, score=float(correct), answer=answer, reason=reason)
