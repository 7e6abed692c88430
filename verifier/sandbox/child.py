"""Owns the program of a judging process, `python -m verifier.sandbox.child PARENT VERIFIER...`.

Must not read a request before it is confined.

Requests and replies are one JSON document per line, on pipes. They are never pickled: a judged text can take over this
process, and unpickling would run its code in the parent. The first reply says whether the process is confined. Each
later reply answers one request and repeats its mark. A request with nothing but a mark asks whether the previous
judgement has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from verifier.sandbox.confinement import confine
from verifier.sandbox.prctl import die_with
from verifier.verifiers.base import bounded
from verifier.verifiers.registry import LIBRARIES, judge

REASON_CHARACTERS = 500


def main(arguments: Sequence[str]) -> int:
    """Judge until standard input ends. `arguments`: the parent's process id, then the verifiers to load."""
    parent, verifiers = int(arguments[0]), arguments[1:]
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # a library that prints must not write into the replies
        os.dup2(nothing, standard)
    try:
        die_with(parent)
        for library in sorted({LIBRARIES[name] for name in verifiers if name in LIBRARIES}):
            importlib.import_module(library)
        gaps = confine()
    except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
        _reply(replies, refused=f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
        return 1
    os.dup2(nothing, 2)  # a judged text must not write into the log
    _reply(replies, gaps=gaps)
    for request in requests:
        mark, *asked = json.loads(request)
        _reply(replies, to=mark, **(_answer(asked) if asked else {}))
    return 0


def _answer(asked: list[Any]) -> dict[str, object]:
    try:
        judgement = judge(*asked)
        return {"correct": judgement.correct, "score": judgement.score, "answer": bounded(judgement.answer)}
    except BaseException as error:  # noqa: BLE001 - a text can make a verifier raise anything, SystemExit too
        return {"reason": f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]}


def _reply(replies: BinaryIO, **fields: object) -> None:
    replies.write(json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
