"""Owns what a reward of your own may give: a bool, a number, or an object with score, correct and reason.

Must not guess: anything else is no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verifier.verifiers.base import Judgement, UndecidedError

FIELDS = frozenset({"score", "correct", "reason", "answer"})
EXPECTED = "a bool, a number from 0 to 1, or an object with score, correct and reason"
SHOWN = 80
CERTAIN = 1.0


def judgement_of(value: Any) -> Judgement:
    """The judgement that a returned value stands for: a number is correct iff it is 1.

    An object has `score` or `correct` or both, and may have `reason` and `answer`, which are texts. Raises
    UndecidedError for anything else, NaN and numbers outside [0, 1] included.
    """
    if not isinstance(value, Mapping):
        score = _score(value, value)
        return Judgement(correct=score >= CERTAIN, score=score)
    if not FIELDS.issuperset(value) or not {"score", "correct"} & set(value):
        raise _unusable(value)
    correct = value.get("correct")
    if correct is not None and not isinstance(correct, bool):
        raise _unusable(value)
    score = _score(value["score"], value) if value.get("score") is not None else _score(correct, value)
    texts = {name: value.get(name, "") for name in ("reason", "answer")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise _unusable(value)
    return Judgement(correct=score >= CERTAIN if correct is None else correct, score=score, **texts)


def _score(given: Any, value: Any) -> float:
    if isinstance(given, bool):
        return float(given)
    try:  # numpy's numbers are not int or float, but convert to them
        number = math.nan if given is None or isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise _unusable(value)
    return number


def _unusable(value: Any) -> UndecidedError:
    try:
        text = repr(value)
    except BaseException as error:  # noqa: BLE001 - the object's own code
        text = f"an object whose repr() raises {type(error).__name__}"
    return UndecidedError(f"it returned {text[:SHOWN]} ({type(value).__name__}), expected {EXPECTED}")
