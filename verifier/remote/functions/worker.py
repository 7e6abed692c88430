"""Owns the process of one text: it reads the text, calls the function, writes a judgement and ends.

Must not return to the program that forked it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verifier.processes.prctl import permit_inspection
from verifier.remote.functions.tree import restrict_signals
from verifier.verifiers.base import UndecidedError
from verifier.verifiers.returned import judgement_of

FIRST_VICTIM = "1000"
TEXT_CHARACTERS = 2000

Function = Callable[[list[dict[str, str]], str, Any, Mapping[str, Any]], Any]


def work(channel: int, function: Function, folder: Path, cpu_s: float) -> None:
    """Judge the one request of `channel` and exit. `folder`: of the function's files, for error texts."""
    try:
        with os.fdopen(channel, "rb", closefd=False) as requests:
            request = json.load(requests)
        try:
            _settle(cpu_s)
        except (OSError, ValueError) as error:
            reply = {"error": f"its process could not be set up: {error}"}
        else:
            reply = _reply(request, function, folder)
        _write(channel, json.dumps(reply).encode())
    finally:  # whatever happened: neither exit handlers nor the caller's code may run
        os._exit(0)


def _settle(cpu_s: float) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    permit_inspection()
    with suppress(OSError):  # systems other than Linux have no such file
        Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)
    seconds = math.ceil(cpu_s)
    _lower(resource.RLIMIT_CPU, seconds, seconds + 1)
    _lower(resource.RLIMIT_CORE, 0, 0)
    restrict_signals()


def _lower(limit: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(limit)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(limit, (soft, hard))


def _reply(request: Mapping[str, Any], function: Function, folder: Path) -> dict[str, Any]:
    try:
        value = function(request["prompt"], request["response"], request["reference"], request["metadata"])
        judgement = judgement_of(value)
    except UndecidedError as error:
        return {"error": str(error)[:TEXT_CHARACTERS]}
    except BaseException as error:  # noqa: BLE001 - the function's own, SystemExit too
        return {"error": f"it raised {described(error, folder)}"}
    return {
        "correct": judgement.correct,
        "score": judgement.score,
        "reason": judgement.reason[:TEXT_CHARACTERS],
        "answer": judgement.answer[:TEXT_CHARACTERS],
    }


def described(error: BaseException, folder: Path) -> str:
    """An exception of the function's file in one line: its type, text, file and line."""
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception as second:  # noqa: BLE001 - the exception's own code
        text = f"its text raises {type(second).__name__}"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    own = [(name, line) for name, line in places if name.startswith(f"{folder}/")]
    where = ""
    if found := own[-1:] or places[-1:]:
        [(name, line)] = found
        where = f" ({name.replace(f'{folder}/', './')} line {line})"
    return f"{type(error).__name__}: {text[:TEXT_CHARACTERS]}{where}"


def _write(channel: int, reply: bytes) -> None:
    left = memoryview(reply)
    while left:
        left = left[os.write(channel, left) :]
