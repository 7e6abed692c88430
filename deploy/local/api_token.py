"""Owns the token of the laptop's API, from the start of its stack to the end.

Must not put it where other users, or processes of rewards, could read it.
"""

from __future__ import annotations

from deploy.local.preflight import StackError
from services.api.access.local_token import VARIABLE, remove_token, token_path, write_token
from services.api.access.settings import AccessFileError


class ApiToken:
    """The token of the API on a port, in a file that the command line finds."""

    def __init__(self, port: int) -> None:
        self._path = token_path(port)
        self._token = ""

    @property
    def environment(self) -> dict[str, str]:
        """What the gateway needs to know: where the file is."""
        return {VARIABLE: str(self._path)}

    def write(self) -> None:
        """Make a new token. Raises StackError."""
        try:
            self._token = write_token(self._path)
        except AccessFileError as error:
            raise StackError(str(error)) from None

    def remove(self) -> None:
        """Remove the file, if `write` has made it."""
        if self._token:
            remove_token(self._path)

    def sign_in_link(self, api: str) -> str:
        """The page's address with the token, for the user who starts the stack on a terminal; for no log."""
        return f"{api}/#token={self._token}"
