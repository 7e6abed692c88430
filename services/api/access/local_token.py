"""Owns the token of a laptop's stack: a random one in a file that only its owner can read, for as long as it runs.

Must not be in a variable, an argument or a log: processes of rewards inherit variables.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from services.api.access.settings import AccessFileError
from services.api.access.tokens import new_token

VARIABLE = "PENSTOCK_TOKEN_FILE"
MOST_BYTES = 4096
SECRET = stat.S_IRUSR | stat.S_IWUSR


def token_path(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the token of the stack whose API listens on `port` is; the command line and the page look there."""
    state = environment.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "penstock" / f"token-{port}"


def write_token(path: Path) -> str:
    """Write a new token, in place of one that a stack left behind when it was killed. Raises AccessFileError.

    A reader finds a whole token or no file: the token is written to a file of its own, mode 0600, and renamed.
    """
    token = new_token()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(path.parent.stat(), path.parent)
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"{token}\n")
            os.replace(partial, path)  # a link at `path` is replaced, not followed
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise _unusable(path, f"a place for the API's token that can be written ({error.strerror})") from None
    return token


def read_token(path: Path) -> str:
    """The token in a file. Raises AccessFileError for a file that others could have written or can read."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            _check(found, path)
            if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & ~SECRET:
                raise _unusable(path, "a file that only its owner can read (mode 0600)")
            token = file.read(MOST_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise _unusable(path, f"a file with the API's token ({error.strerror})") from None
    if not token:
        raise _unusable(path, "a file with the API's token; it is empty")
    return token


def remove_token(path: Path) -> None:
    """Remove the file, if it is there."""
    path.unlink(missing_ok=True)


def _check(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.geteuid():
        raise _unusable(path, "an owner who is you")


def _unusable(path: Path, expected: str) -> AccessFileError:
    return AccessFileError(f"{VARIABLE}: {str(path)!r} is not valid: expected {expected}")
