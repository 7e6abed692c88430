"""Owns the errors of rewards over HTTP: what cannot be set up, and what a service did wrong.

Must not carry a secret: their texts reach logs and verdicts.
"""

from __future__ import annotations

LINE_CHARACTERS = 300
SHOWN_CHARACTERS = 120


class RemoteSetupError(ValueError):
    """A reward cannot be used before its settings change. One line: `field: VALUE is not valid: expected ...`."""


class ServiceFaultError(Exception):
    """A request got no usable answer. One line that names the service's host and the fault.

    `repeats`: the same request may succeed later, after `wait_s` seconds if the service gave them. `blamed`: it says
    something about the service, not about what was sent. `unspent`: the service certainly did no work for it.
    """

    def __init__(
        self,
        text: str,
        *,
        repeats: bool = False,
        blamed: bool = True,
        unspent: bool = False,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(one_line(text))
        self.repeats = repeats
        self.blamed = blamed
        self.unspent = unspent
        self.wait_s = wait_s


def one_line(text: str, most: int = LINE_CHARACTERS) -> str:
    """`text` as one line of at most `most` printable characters; others become spaces."""
    cut = text[: 4 * most]  # a service may send megabytes
    line = " ".join("".join(char if char.isprintable() else " " for char in cut).split())
    return line if len(line) <= most and len(cut) == len(text) else f"{line[: most - 3]}..."
