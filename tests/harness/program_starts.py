"""Owns several starts of one program, as forks of a process that has imported it: the import takes longest.

Must not be used where the import itself may fail.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

DEADLINE_S = 120.0


class Start(NamedTuple):
    """A start: its arguments, and the variables that it has beside those of the test."""

    arguments: Sequence[str]
    variables: Mapping[str, str] = {}


class Ended(NamedTuple):
    """How a start ended."""

    status: int
    output: str
    errors: str


def started(module: str, starts: Sequence[Start]) -> list[Ended]:
    """Start `python -m MODULE` as often, all at once; how each ended, in their order."""
    asked = json.dumps([module, starts])
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return [Ended(*each) for each in json.loads(done.stdout)]


def main() -> None:
    """Read a module and its starts from standard input, and write how each ended to standard output, as JSON."""
    module, starts = json.load(sys.stdin)
    importlib.import_module(f"{module}.__main__")
    del sys.modules[f"{module}.__main__"]  # it is run as `__main__`
    running = [_forked(module, *start) for start in starts]
    json.dump([_ended(*each) for each in running], sys.stdout)


def _forked(module: str, arguments: list[str], variables: dict[str, str]) -> tuple[int, Any, Any]:
    output, errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when it has ended
    if (child := os.fork()) == 0:
        for file, standard in ((output, 1), (errors, 2)):
            os.dup2(file.fileno(), standard)
        os.environ.update(variables)
        os._exit(_run(module, arguments))
    return child, output, errors


def _run(module: str, arguments: list[str]) -> int:
    """Run the module as the interpreter would; its exit status."""
    sys.argv[1:] = arguments
    status: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status or 0


def _ended(child: int, output: Any, errors: Any) -> tuple[int, str, str]:
    _, code = os.waitpid(child, 0)
    texts = []
    for file in (output, errors):
        file.seek(0)
        texts.append(file.read())
    return os.waitstatus_to_exitcode(code), texts[0], texts[1]


if __name__ == "__main__":
    main()
