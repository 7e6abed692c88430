"""Owns the trial of references: a program of the verifier reads each of them once, before a prompt is drawn.

Must not import the verifier, which is not below services; nor decide what a bad reference means.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

PROGRAM = (sys.executable, "-m", "verifier.references")
START_S, REFERENCE_S = 120.0, 0.05
"""The deadline of the program in seconds: for its start, and in addition per reference."""

PASSED = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "MPLCONFIGDIR", "PATH"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "TMPDIR", "TZ"),
)
"""Variables that the program gets. It parses texts of strangers, so it gets no credentials."""


class ReferenceTrialError(RuntimeError):
    """References could not be tried, which says nothing about them: the program died, or exceeded its deadline."""


def request_of(verifier: str, reference: Mapping[str, Any]) -> bytes:
    """The line that asks for the trial of a reference; equal for equal references.

    Raises ValueError if the reference cannot be sent in messages: it must consist of JSON values and of text that has
    a form in UTF-8.
    """
    request = {"verifier": verifier, "reference": reference}
    return _json(request).encode() + b"\n"


def check_json(value: Mapping[str, Any]) -> None:
    """Raise ValueError unless the value can be sent in messages, as `request_of` says."""
    _json(value).encode()


def _json(value: Mapping[str, Any]) -> str:
    try:
        # NaN would arrive as null.
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def tried(requests: Iterable[bytes]) -> list[str]:
    """For each request, in their order: why its reference cannot be read, or '' if it can. Blocks; writes to TMPDIR.

    Raises ReferenceTrialError.
    """
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as errors:
        count = sum(1 for request in requests if asked.write(request))
        if not count:
            return []
        deadline_s = START_S + REFERENCE_S * count
        asked.seek(0)
        status = _run(asked, answers, errors, deadline_s)
        answers.seek(0)
        faults = [_fault(line) for line in answers if line.endswith(b"\n")]
        if status != 0 or len(faults) != count:
            raise ReferenceTrialError(
                f"the program that tries references {_end(status, deadline_s)} after {len(faults)} of {count} "
                f"references{_last_line(errors)}"
            )
        return faults


def _run(asked: IO[bytes], answers: IO[bytes], errors: IO[bytes], deadline_s: float) -> int | None:
    """The program's exit status; None if it was killed because of its deadline."""
    # The program must be found from any folder, as this code was; the folder that it starts in comes first.
    code = Path(__file__).parents[3]
    path = os.pathsep.join([str(code), *(str(Path(entry).absolute()) for entry in sys.path if entry)])
    environment = {name: os.environ[name] for name in PASSED if name in os.environ} | {"PYTHONPATH": path}
    files: dict[str, Any] = {"stdin": asked, "stdout": answers, "stderr": errors}
    try:
        return subprocess.run(PROGRAM, **files, env=environment, cwd=code, timeout=deadline_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def _fault(line: bytes) -> str:
    try:
        return str(json.loads(line).get("fault", ""))
    except (ValueError, AttributeError):
        raise ReferenceTrialError(f"the program that tries references wrote {line[:80]!r}, expected JSON") from None


def _end(status: int | None, deadline_s: float) -> str:
    if status is None:
        return f"exceeded its deadline of {deadline_s:.4g} s and was killed"
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
