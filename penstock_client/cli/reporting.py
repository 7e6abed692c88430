"""Owns how a command ends: its exit status, an error in one line, and what happens to an unexpected exception.

Must not import anything heavy at module level: `penstock --help` answers within a second.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from penstock_client.cli.terminal import plain

EXIT_FAILED = 1
"""The run, or a check, did not succeed."""
EXIT_ERROR = 2
"""The command could not do its work."""
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
DEBUG_VARIABLE = "PENSTOCK_DEBUG"
LOG = "penstock-error.log"


def fail(message: str) -> NoReturn:
    """Print `penstock: MESSAGE` on standard error, control characters escaped, and exit with status 2."""
    lines = [plain(line) for line in message.split("\n")]
    print("penstock: " + "\n".join(lines), file=sys.stderr)
    raise typer.Exit(EXIT_ERROR) from None


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"penstock: warning: {plain(text)}", file=sys.stderr, flush=True)


@contextmanager
def reported(*expected: type[Exception]) -> Iterator[None]:
    """Report the client's errors, and those `expected`, with `fail`; Ctrl-C exits with 130."""
    from penstock_client.errors import ApiError

    kinds: tuple[type[Exception], ...] = (ApiError, *expected)
    try:
        yield
    except kinds as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def debugging() -> bool:
    """Whether --debug or PENSTOCK_DEBUG was given."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def log_everything() -> None:
    """Log what the client does, and tracebacks, on standard error. No log line has a header, so none has a token."""
    os.environ[DEBUG_VARIABLE] = "1"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")


def run_command_line(app: Callable[[], object]) -> NoReturn:
    """Run the command and exit with its status; an exception is one line, and a file with the traceback."""
    if sys.stdout is None:  # it was closed before the start
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as this process lives
    try:
        try:
            app()
        finally:
            # Here rather than at the interpreter's end, which would report a closed pipe.
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        status = _discard_output(None)
    except Exception as error:  # noqa: BLE001  # a user must see one line, not a traceback
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
        status = _discard_output(error) if full else _report(error)
    else:
        status = 0
    sys.exit(status)


def _discard_output(error: Exception | None) -> int:
    """Write the rest of the output nowhere: it cannot be written, and the interpreter's end would try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error is None:
        return EXIT_BROKEN_PIPE
    print(f"penstock: the output cannot be written: {error}", file=sys.stderr)
    return EXIT_ERROR


def _report(error: Exception) -> int:
    text = "".join(traceback.format_exception(error))
    if debugging():
        sys.stderr.write(text)
        return EXIT_ERROR
    what = plain(f"unexpected {type(error).__name__}: {error}")[:300]
    print(f"penstock: {what}; {_write_log(text)}, and --debug prints it", file=sys.stderr)
    return EXIT_ERROR


def _write_log(text: str) -> str:
    from penstock_client.access import state_folder

    path = state_folder() / LOG
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _private(path).write_text(text)
    except OSError as error:
        return f"its log cannot be written to {path} ({error.strerror})"
    return f"{path} has the log"


def _private(path: Path) -> Path:
    """The file, made for this user alone."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    return path
