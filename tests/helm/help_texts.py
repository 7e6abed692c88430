"""Owns what modules print for `--help`: `python -m tests.helm.help_texts` reads their command lines as JSON.

Must not import Penstock: each module runs in a separate process, as with `python -m`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback

import ray  # noqa: F401  slowest to import; imported once for all forked processes


def run(command: list[str]) -> int:
    """Run `python -m COMMAND --help` in this process, and return its exit status."""
    sys.argv = [*command, "--help"]
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001  the parent reports it
        traceback.print_exc()
        return 1
    return 0


def forked(command: list[str]) -> tuple[int, str]:
    """Run one command in a new process; returns its exit status and its output."""
    with tempfile.TemporaryFile("w+") as printed:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            status = run(command)
            sys.stdout.flush()
            os._exit(status)
        _, ending = os.waitpid(child, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(ending), printed.read()


if __name__ == "__main__":
    print(json.dumps([forked(command) for command in json.load(sys.stdin)]))
