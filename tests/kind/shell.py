"""Owns how `make test-kind` runs a command and waits for a fact: each with a deadline and a name.

Must not know what the commands mean.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Fact = TypeVar("Fact")
REPORT_S = 60.0
"""Seconds after which a wait is reported again."""


class RehearsalError(RuntimeError):
    """A command failed, or a fact did not come true in time. The text names it."""


class MissingProgramError(RehearsalError):
    """A program that the rehearsal needs is not on PATH."""


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Shell:
    """Runs commands in one folder with one environment."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, dict(environment)

    def output(self, command: list[str], deadline_s: float, given: str = "") -> str:
        """Run a command; returns its output. Raises RehearsalError if it fails, or at the deadline."""
        status, output, errors = self.outcome(command, deadline_s, given)
        if status:
            raise RehearsalError(f"`{shown(command)}` has exit status {status}: {(errors or output).strip()[-2000:]}")
        return output

    def outcome(self, command: list[str], deadline_s: float, given: str = "") -> tuple[int, str, str]:
        """Run a command that may fail; returns exit status, output, errors. Raises RehearsalError at the deadline."""
        options: dict[str, Any] = {"cwd": self._folder, "env": self._environment, "timeout": deadline_s}
        try:
            done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, **options)
        except subprocess.TimeoutExpired:
            raise RehearsalError(f"`{shown(command)}` did not end within {deadline_s:g} s") from None
        except OSError as error:
            raise RehearsalError(f"`{shown(command)}` cannot be run: {error}") from None
        return done.returncode, done.stdout, done.stderr

    def follow(self, command: list[str], deadline_s: float) -> None:
        """Run a command whose output is printed. Raises RehearsalError if it fails, or at the deadline."""
        say(f"$ {shown(command)}")
        options: dict[str, Any] = {"cwd": self._folder, "env": self._environment}
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
        except OSError as error:
            raise RehearsalError(f"`{shown(command)}` cannot be run: {error}") from None
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise RehearsalError(f"`{shown(command)}` did not end within {deadline_s:g} s") from None
        finally:
            if process.poll() is None:
                # With what it started: the engine behind `make` would continue.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            raise RehearsalError(f"`{shown(command)}` has exit status {status}")


def shown(command: list[str]) -> str:
    """A command as one line, cut where it is long."""
    line = " ".join(command)
    return line if len(line) < 200 else f"{line[:200]}..."


def until(what: str, deadline_s: float, look: Callable[[], Fact | None], pause_s: float = 3.0) -> Fact:
    """Wait until `look` returns something; its commands may fail meanwhile. Raises RehearsalError at the deadline."""
    started = reported = time.monotonic()
    last = ""
    while True:
        try:
            if (found := look()) is not None:
                return found
            last = ""
        except RehearsalError as error:
            last = f"; last: {error}"
        now = time.monotonic()
        if now - started > deadline_s:
            raise RehearsalError(f"{what}: not within {deadline_s:g} s{last}")
        if now - reported > REPORT_S:
            reported = now
            say(f"waiting for {what}, for {now - started:.0f} s{last}")
        time.sleep(pause_s)
