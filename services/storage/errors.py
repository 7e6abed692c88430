"""Owns what may go wrong with a store.

Must not know a library's errors; `objects` reads those.
"""

from __future__ import annotations

import errno


class StoreError(OSError):
    """The store refuses, or what it holds is not what was put there. Repeating it is of no use.

    The text names the variable or the address, never a credential.
    """

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)

    def __reduce__(self) -> tuple[type[StoreError], tuple[str]]:
        """It comes from other processes too."""
        return type(self), (str(self),)

    def __str__(self) -> str:
        """The text alone; it is no fault of the operating system."""
        return str(self.strerror)


class StoreAwayError(StoreError):
    """The store does not answer, or says that it cannot just now. It may later."""


class MissingObjectError(StoreError):
    """There is no such object."""
