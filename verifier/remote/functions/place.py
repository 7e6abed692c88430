"""Owns where the functions' server is: a Unix socket, or the URL and secret that a cluster gives.

Must not show the secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from services.settings.rewards.kinds import checked_url
from verifier.remote.faults import RemoteSetupError
from verifier.remote.signature import secret_from

URL_VARIABLE = "PENSTOCK_FUNCTIONS_URL"
SECRET_VARIABLE = "PENSTOCK_FUNCTIONS_SECRET"
SECRET_FILE_VARIABLE = "PENSTOCK_FUNCTIONS_SECRET_FILE"
PIPES = "/dev/fd/"
LOCAL_URL = "http://functions"
"""Of the server on a Unix socket: its host is only a name in error texts."""


@dataclass(frozen=True)
class FunctionsPlace:
    """A functions' server. `socket`: the path of its Unix socket, if it has one."""

    secret: SecretStr
    url: str = LOCAL_URL
    socket: str | None = None


def place_from(environ: Mapping[str, str] = os.environ) -> FunctionsPlace | None:
    """The server that a cluster's variables name; None if they name none. Raises RemoteSetupError."""
    url = environ.get(URL_VARIABLE)
    if not url:
        return None
    try:
        checked_url(url)
    except ValueError as error:
        raise RemoteSetupError(f"{URL_VARIABLE}: {error}") from None
    if not environ.get(SECRET_FILE_VARIABLE):
        raise RemoteSetupError(f"{SECRET_FILE_VARIABLE}: not set: expected the file with the secret of {URL_VARIABLE}")
    return FunctionsPlace(secret_in_file(Path(environ[SECRET_FILE_VARIABLE])), url)


def secret_in_file(path: Path) -> SecretStr:
    """The secret that a file holds. Raises RemoteSetupError."""
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RemoteSetupError(f"{SECRET_FILE_VARIABLE}: {str(path)!r} cannot be read: {reason}") from None
    return secret_from({str(path): content}, SECRET_FILE_VARIABLE, str(path))


def secret_on_pipe(secret: SecretStr) -> tuple[int, dict[str, str]]:
    """A pipe that holds the secret, and the variable that names it to the program that inherits the descriptor."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(secret.get_secret_value().encode())
    return reader, {SECRET_FILE_VARIABLE: f"{PIPES}{reader}"}


def on_pipe(environ: Mapping[str, str]) -> bool:
    """Whether the secret was given on a pipe: nothing else can read it there."""
    return SECRET_VARIABLE not in environ and environ.get(SECRET_FILE_VARIABLE, "").startswith(PIPES)
