"""Owns the program of a judging process: `python -m verifier.sandbox.child PARENT VERIFIER...`, requests in, judgements
out.

Must not read a request before it is confined.

One JSON document per line, on pipes: never pickle, for what a judged text made of this process would then run in the
one that reads. The first line out says whether it is confined; each further one answers a line in, with that line's
mark. A line that holds nothing but a mark asks whether the judgement before it has come to its end.
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
    """Judge until standard input ends. `arguments`: the parent's process id, the verifiers whose libraries to load."""
    parent, verifiers = int(arguments[0]), arguments[1:]
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # a library that prints must not write into the replies
        os.dup2(nothing, standard)
    try:
        die_with(parent)
        for library in sorted({LIBRARIES[one] for one in verifiers if one in LIBRARIES}):
            importlib.import_module(library)
        gaps = confine()
    except Exception as error:  # noqa: BLE001 - said to the parent, which raises it
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
    except BaseException as error:  # noqa: BLE001 - whatever a text made a verifier raise, exit() too, is its reason
        return {"reason": f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]}


def _reply(replies: BinaryIO, **fields: object) -> None:
    replies.write(json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
