"""Owns the table of built-in verifiers, and the call of a user's function.

Must not contain a verifier, nor import a library that takes long: see verifier.verifiers.loading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from verifier.verifiers import answer_line, reasoning_gym, regex
from verifier.verifiers.base import Candidate, Judge, Judgement, UndecidedError
from verifier.verifiers.loading import described
from verifier.verifiers.math.verdict import judge as judge_math
from verifier.verifiers.returned import judgement_of

VERIFIERS: dict[str, Judge] = {
    "reasoning-gym": reasoning_gym.judge,
    "math": judge_math,
    "answer-line": answer_line.judge,
    "pattern": regex.judge,
}

EVERY = "*"
"""Stands for all texts of a kind in `apart`."""


def apart(kind: str) -> list[str]:
    """Which texts need a process of their own: EVERY, or those of these tasks, whose scorers evaluate text."""
    if kind == "python":
        return [EVERY]
    return reasoning_gym.evaluating_tasks() if kind == "reasoning-gym" else []


def judge_with(function: Callable[..., Any] | None, files: Mapping[str, str], request: Mapping[str, Any]) -> Judgement:
    """Judge a request's candidate, by `function` if there is one, else by the built-in verifier of its kind.

    Raises ValueError for an unknown kind or an unusable reference, UndecidedError.
    """
    candidate = Candidate(request["text"], request["reference"], tuple(request["messages"]), request["metadata"])
    if function is None:
        return judge(request["kind"], candidate.text, candidate.reference, request["options"])
    return _called(function, str(request["options"]["function"]), files, candidate)


def judge(kind: str, text: str, reference: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Judgement:
    """Judge by the name of a built-in verifier. Raises ValueError for an unknown name or an unusable reference."""
    if kind not in VERIFIERS:
        raise ValueError(f"verifier: {kind!r} is not valid: expected one of {', '.join(sorted(VERIFIERS))}")
    try:
        return VERIFIERS[kind](text, reference, options or {})
    except KeyError as error:
        raise ValueError(f"reference: a field is missing for verifier {kind!r}: expected {error}") from None


def _called(function: Callable[..., Any], name: str, files: Mapping[str, str], candidate: Candidate) -> Judgement:
    messages = [dict(message) for message in candidate.messages]
    reference, metadata = copy.deepcopy(candidate.bare_reference), dict(candidate.metadata)
    try:
        returned = function(messages, candidate.text, reference, metadata)
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        raise UndecidedError(f"{name} raised {described(error, files)}") from None
    try:
        return judgement_of(returned)
    except UndecidedError as error:
        raise UndecidedError(f"{name}: {error}") from None
