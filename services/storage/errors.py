"""Owns the errors of a store, and of the hub.

Must not know a library's errors; `objects` and `hub.download` translate those.
"""

from __future__ import annotations

import errno
import re


class StoreError(OSError):
    """The store rejects a request, or its content is not what was put there. A retry does not help.

    The text names the variable or the address, never a credential.
    """

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)

    def __reduce__(self) -> tuple[type[StoreError], tuple[str]]:
        """How to pickle it, because other processes send it pickled."""
        return type(self), (str(self),)

    def __str__(self) -> str:
        """The text alone, without the error number."""
        return str(self.strerror)


class StoreOutageError(StoreError):
    """The store does not answer, or cannot serve requests now. A later retry may succeed."""


class MissingObjectError(StoreError):
    """The object does not exist."""


def harmless(text: str) -> str:
    """The text without credentials in URLs."""
    return re.sub(r"://[^/@\s]*@", "://", text)
