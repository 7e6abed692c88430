"""Owns the program `python -m verifier.references`: it tries references before any response is judged with them.

Must not judge, nor connect to anything; it reads requests from standard input and writes answers to standard output.

A request is a line of JSON, {"verifier": TEXT, "reference": OBJECT}; its answer is {} or {"fault": TEXT}, in the order
of the requests. A reference is a stranger's text, and libraries may hang on it, even where Python cannot interrupt
them. So a process forked for it reads the references one after the other, with a limit of the kernel on the time of
each; when it dies of one, that one is at fault, and another process continues with the next.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from services.settings.rewards.reward import Reward, RewardError, parse_text
from verifier.processes.prctl import die_with

Check = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""(reference, options of the reward) -> None. Raises ValueError for a reference that its verifier cannot read."""

CPU_S, CLOCK_S = 5.0, 60.0
"""How long the process may take for one reference: of CPU time, and by the clock."""
MEMORY_BYTES = 4 << 30
MOST_PATTERN = 2000
FAULT_CHARACTERS = 500
ENDINGS: Mapping[int, str] = {
    signal.SIGPROF: f"took longer than {CPU_S:g} s to read",
    signal.SIGALRM: f"took longer than {CLOCK_S:g} s by the clock to read",
}
"""Why a process that read a reference died, by signal: these are its own limits."""
STOPS = (signal.SIGINT, signal.SIGTERM)


def _shown(value: object) -> str:
    """A value as errors show it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _math(reference: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from verifier.verifiers.math.verdict import check_reference  # here, so that other kinds do not wait for it

    check_reference(reference, options)


def _answer_line(reference: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from verifier.verifiers.answer_line import normalised

    answer = reference["answer"]
    usable = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    if not usable or not normalised(str(answer)):
        expected = "a text or a number that is not blank after normalisation"
        raise ValueError(f"reference answer: {_shown(answer)} is not valid: expected {expected}")


def _pattern(reference: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    pattern = reference["pattern"]
    if not isinstance(pattern, str) or len(pattern) > MOST_PATTERN:
        expected = f"a regular expression of at most {MOST_PATTERN} characters"
        raise ValueError(f"reference pattern: {_shown(pattern)} is not valid: expected {expected}")
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(
            f"reference pattern: {_shown(pattern)} is not valid: expected a regular expression ({error})"
        ) from None


def _reasoning_gym(reference: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    import reasoning_gym

    task, entry = reference["task"], reference["entry"]
    try:
        if not isinstance(task, str):
            raise ValueError
        reasoning_gym.get_score_answer_fn(task)
    except ValueError:
        raise ValueError(f"reference task: {_shown(task)} is not valid: expected a task of reasoning-gym") from None
    if not isinstance(entry, dict) or entry.get("answer") is None:
        raise ValueError(f"reference entry: {_shown(entry)} is not valid: expected an object with answer")


def _code(reference: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from verifier.programs.verdict import check_reference

    check_reference(reference)


def _any_json(reference: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Only the user's own reward knows what it can read; that it is JSON, the request has shown."""


CHECKS: Mapping[str, Check] = {
    "math": _math,
    "answer-line": _answer_line,
    "pattern": _pattern,
    "reasoning-gym": _reasoning_gym,
    "code": _code,
    "python": _any_json,
    "http": _any_json,
    "judge": _any_json,
}
"""By kind of reward."""

SLOW_LIBRARIES: Mapping[str, str] = {"reasoning-gym": "reasoning_gym"}
"""By kind: a library whose import takes so long that it must not count as the time of the first reference."""


def fault_of(verifier: str, reference: Mapping[str, Any]) -> str:
    """Why the reward with this text cannot read this reference; '' if it can, with all parts of a combination."""
    try:
        for single in parse_text(verifier).singles:
            CHECKS[single.kind](reference, _options(single))
    except ImportError:
        raise  # of this installation, not of the reference
    except ValueError as error:
        return _line(str(error) or "cannot be read")
    except KeyError as error:
        return _line(f"reference: {_shown(dict(reference))} is not valid: expected {error}")
    except Exception as error:  # noqa: BLE001 - a library may raise anything; the judge would fail in the same way
        return _line(f"raises {type(error).__name__} when it is read{f': {error}' if str(error) else ''}")
    return ""


def _load_libraries(verifier: str) -> None:
    """Import the slow libraries of a reward without a limit on the time."""
    try:
        kinds = {single.kind for single in parse_text(verifier).singles}
    except RewardError:
        return  # the fault of the reference, which is reported when it is read
    for name in {SLOW_LIBRARIES[kind] for kind in kinds & SLOW_LIBRARIES.keys()} - sys.modules.keys():
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        importlib.import_module(name)


def _options(single: Reward) -> dict[str, Any]:
    return single.options.model_dump(mode="json", exclude_defaults=True) if single.options else {}


def _line(text: str) -> str:
    """The text in one line, without its middle if it is long: the value is there, the expectation is at the end."""
    line, half = " ".join(text.split()), FAULT_CHARACTERS // 2
    return line if len(line) <= FAULT_CHARACTERS else f"{line[:half]}...{line[-half:]}"


def _answer_line_of(fault: str) -> bytes:
    return json.dumps({"fault": fault} if fault else {}).encode() + b"\n"


def _limit_resources() -> None:
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # when memory runs out, the kernel kills this process before the one that waits for it
        Path("/proc/self/oom_score_adj").write_text("1000")


def _read_all(requests: list[bytes], answers: int) -> None:
    """In a process forked for it: write the answer of each request to the pipe `answers` before the next is read."""
    _limit_resources()
    os.dup2(2, 1)  # what a library prints must not be among the answers
    for request in requests:
        asked = json.loads(request)
        _load_libraries(asked["verifier"])
        # The default action of both signals ends the process, also inside a library that never returns to Python.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.setitimer(signal.ITIMER_REAL, CLOCK_S)
        os.write(answers, _answer_line_of(fault_of(asked["verifier"], asked["reference"])))


def _forked(requests: list[bytes]) -> tuple[int, BinaryIO]:
    """A process that reads these references: its id, and the pipe with its answers."""
    reading, writing = os.pipe()
    parent = os.getpid()
    if (child := os.fork()) == 0:
        status = 1
        try:
            die_with(parent)
            os.close(reading)
            _read_all(requests, writing)
            status = 0
        except BaseException:  # noqa: BLE001 - reported, and the parent must not run twice
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    return child, os.fdopen(reading, "rb")


def try_all(requests: list[bytes], answers: BinaryIO) -> int:
    """Write the answer to each request; returns the exit status, 0 once all have one."""
    done = 0
    while done < len(requests):
        child, lines = _forked(requests[done:])
        with lines:
            for line in lines:
                answers.write(line)
                done += 1
        _, code = os.waitpid(child, 0)
        status = os.waitstatus_to_exitcode(code)
        if status > 0 or -status in STOPS:
            return abs(status)
        if status < 0:
            name = signal.Signals(-status).name
            answers.write(_answer_line_of(ENDINGS.get(-status, f"ends the process that reads it ({name})")))
            done += 1
    return 0


def main() -> int:
    """Answer the requests on standard input. Returns the exit status."""
    die_with(os.getppid())
    status = try_all(sys.stdin.buffer.readlines(), sys.stdout.buffer)
    sys.stdout.buffer.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
