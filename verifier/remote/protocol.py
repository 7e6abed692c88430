"""Owns what a service that judges gets and what it answers.

Must not send anything.

A request is `POST` with a body of JSON in UTF-8:

    {"schema_version": 1,
     "requests": [{"id": "0",
                   "prompt": [{"role": "user", "content": "2 + 2?"}],
                   "response": "Answer: 4",
                   "reference": "4",
                   "metadata": {}}]}

`id` is unique within the request, and `response` is untrusted text. `reference` is the row's answer, or the object that
the row gives; `metadata` is the row's. The answer has the status 200, is not compressed, has at most 16 MiB, and is

    {"results": [{"id": "0", "score": 0.5, "correct": false, "reason": "half of it", "answer": "4"}]}

A result has `score` (a number from 0 to 1) or `correct` (a bool) or both; `reason` and `answer` are optional texts.
Without `correct`, a response is correct iff its score is 1. Results may come in any order if they have ids. If none has
an id, they are in the order of the requests and as many, and each may also be a bare bool or number. A service that
cannot judge one text says so with `{"id": "0", "error": "why"}`.

A text whose result is missing, comes twice or is anything else (NaN, 2, null) is `unknown`, and the others count. Ids
that were not sent are ignored. An answer without ids whose number of results is wrong makes all of its texts `unknown`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from verifier.remote.faults import ServiceFaultError, one_line
from verifier.verifiers.base import Candidate, Judgement, UndecidedError, bounded
from verifier.verifiers.returned import judgement_of

SCHEMA_VERSION = 1
SHOWN = 80

Decision: TypeAlias = Judgement | UndecidedError
"""Of one text: a judgement, or why there is none."""


def encoded_request(place: int, candidate: Candidate) -> bytes:
    """One text as an entry of `requests`; its id is its place. Raises UndecidedError if it cannot be JSON."""
    document = {
        "id": str(place),
        "prompt": [dict(message) for message in candidate.messages],
        "response": candidate.text,
        "reference": candidate.bare_reference,
        "metadata": dict(candidate.metadata),
    }
    try:
        return json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UndecidedError(
            one_line(f"response, reference or metadata: not valid: expected what JSON in UTF-8 can hold: {error}")
        ) from None


def encoded_batch(entries: Sequence[bytes], **more: Any) -> bytes:
    """The body of a request with these entries; `more`: further fields."""
    head = json.dumps({"schema_version": SCHEMA_VERSION, **more}).encode()
    return head[:-1] + b', "requests": [' + b", ".join(entries) + b"]}"


def parsed(host: str, body: bytes) -> Any:
    """The JSON document that a service answered. Raises ServiceFaultError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        shown = one_line(body[: 4 * SHOWN].decode(errors="replace"), SHOWN)
        raise ServiceFaultError(f"{host}: its answer {shown!r} is not valid: expected JSON") from None


def decisions(host: str, document: Any, ids: Sequence[str]) -> list[Decision]:
    """The decision on each id in turn. Raises ServiceFaultError if nothing of the answer can be used."""
    results = document.get("results") if isinstance(document, Mapping) else None
    if not isinstance(results, list):
        raise ServiceFaultError(f'{host}: its answer {_shown(document)} is not valid: expected {{"results": [...]}}')
    if any(isinstance(result, Mapping) and "id" in result for result in results):
        return _by_id(host, results, ids)
    if len(results) != len(ids):
        raise ServiceFaultError(f"{host}: it gave {len(results)} results: expected {len(ids)}, or results with ids")
    return [_decision(host, result) for result in results]


def _by_id(host: str, results: Sequence[Any], ids: Sequence[str]) -> list[Decision]:
    given: dict[str, Any] = {}
    times: Counter[str] = Counter()
    others = 0
    for result in results:
        name = result.get("id") if isinstance(result, Mapping) else None
        if isinstance(name, str) and name in ids:
            times[name] += 1
            given[name] = {field: value for field, value in result.items() if field != "id"}
        else:
            others += 1
    strange = f"; {others} of its {len(results)} results have no id of this request" if others else ""

    def decision(name: str) -> Decision:
        if times[name] != 1:
            return UndecidedError(f"{host}: it gave {times[name]} results for this text: expected 1{strange}")
        return _decision(host, given[name])

    return [decision(name) for name in ids]


def _decision(host: str, result: Any) -> Decision:
    if isinstance(result, Mapping) and isinstance(result.get("error"), str):
        return UndecidedError(one_line(f"{host}: {result['error']}"))
    try:
        return tidy(judgement_of(result))
    except UndecidedError as error:
        return UndecidedError(one_line(f"{host}: {error}"))


def tidy(judgement: Judgement) -> Judgement:
    """The judgement with a bounded answer and a reason of one line."""
    return Judgement(
        judgement.correct, judgement.score, bounded(one_line(judgement.answer, 2000)), one_line(judgement.reason)
    )


def _shown(document: Any) -> str:
    return one_line(json.dumps(document)[: 4 * SHOWN], SHOWN)
