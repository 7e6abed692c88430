"""Owns the life of a judging process: one reply per request.

Must not read a request before the process is confined; its caller sees to that.

Requests and replies are one JSON document per line, on pipes. They are never pickled: a judged text can take over this
process, and unpickling would run its code in the parent. Each reply answers one request and repeats its mark. A request
with nothing but a mark asks whether the previous judgement has ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

from verifier.verifiers.base import Judgement, UndecidedError, bounded

REASON_CHARACTERS = 500


def judge_requests(requests: BinaryIO, replies: BinaryIO, judge: Callable[[Any], Judgement]) -> None:
    """Judge until `requests` ends."""
    for request in requests:
        mark, *asked = json.loads(request)
        reply = {"to": mark, **(_answer(judge, asked[0]) if asked else {})}
        replies.write(json.dumps(reply).encode() + b"\n")


def _answer(judge: Callable[[Any], Judgement], asked: Any) -> dict[str, object]:
    try:
        judgement = judge(asked)
        return {
            "correct": judgement.correct,
            "score": judgement.score,
            "answer": bounded(_whole(judgement.answer)),
            "reason": _whole(judgement.reason)[:REASON_CHARACTERS],
        }
    except UndecidedError as error:
        return {"reason": _whole(str(error))[:REASON_CHARACTERS] or "undecided"}
    except BaseException as error:  # noqa: BLE001 - a text can make a verifier raise anything, SystemExit too
        return {"reason": _whole(f"{type(error).__name__}: {error}")[:REASON_CHARACTERS]}


def _whole(text: str) -> str:
    """Text that can be sent: half of a surrogate pair, which a response may hold, becomes a question mark."""
    return text.encode(errors="replace").decode()
