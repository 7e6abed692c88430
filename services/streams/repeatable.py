"""Owns submissions that a client may repeat: what is stored of one, and what a repetition is answered.

Must not talk to Redis.
"""

from __future__ import annotations

from dataclasses import dataclass

REQUESTS_KEPT_S = 24 * 3600
"""How long a repeated submission has the effect of one."""


class OtherRequestError(ValueError):
    """A key of a repeatable request was used for another request."""


class RepeatedRequestError(RuntimeError):
    """The request was carried out before. `run`: the run that it created."""

    def __init__(self, run: str) -> None:
        super().__init__(f"the request created run {run!r} before")
        self.run = run


@dataclass(frozen=True)
class RepeatableRequest:
    """A submission that its client may repeat: SHA-256 (hexadecimal) of who and its key, and of the request's body."""

    key: str
    body: str

    def stored(self, run: str) -> str:
        """What is stored of it, once it has created a run."""
        return f"{self.body} {run}"

    def check(self, stored: bytes) -> RepeatedRequestError:
        """The error for a request whose key has `stored` something. Raises OtherRequestError for another body."""
        body, _, run = stored.decode().partition(" ")
        if body != self.body:
            raise OtherRequestError(f"the request that created run {run!r} had this key and another body")
        return RepeatedRequestError(run)
