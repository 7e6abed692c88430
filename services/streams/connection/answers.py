"""Owns what each error of Redis asks for: to wait, to load the functions again, to free memory, or to fail.

Must not wait or load; the client and `call` do.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from enum import StrEnum

from redis import exceptions as redis_errors


class Answer(StrEnum):
    """What a caller of Redis does about an error."""

    WAIT = "wait"
    """Repeat the command until it succeeds, or until Redis has been unavailable for too long."""
    WAIT_IF_KNOWN = "wait if known"
    """Wait if this client was accepted before: a password or a certificate is being changed. Else raise."""
    LOAD = "load"
    """Load the library of functions again, then repeat the call."""
    FULL = "full"
    """Raise RedisFullError: nothing was changed; the caller repeats the call when there is memory."""
    FENCED = "fenced"
    """Raise FencedError: a newer owner exists."""
    RAISE = "raise"
    """Raise the error: waiting cannot cure it."""


BY_CODE: Mapping[str, Answer] = {
    "BUSY": Answer.WAIT,  # another client's script runs for too long
    "LOADING": Answer.WAIT,  # the server restarted and reads its file
    "MISCONF": Answer.WAIT,  # the disk is full or cannot be written
    "NOREPLICAS": Answer.WAIT,
    "MASTERDOWN": Answer.WAIT,
    "READONLY": Answer.WAIT,  # a failover made this server a replica
    "UNBLOCKED": Answer.WAIT,  # a failover interrupted a blocking read
    "OOM": Answer.FULL,
    "FENCED": Answer.FENCED,
}
"""By the first word of the server's error."""
BY_CLASS: Mapping[type[Exception], Answer] = {
    # redis-py removes the first word of the errors that it has a class for.
    redis_errors.AuthenticationError: Answer.WAIT_IF_KNOWN,
    redis_errors.AuthorizationError: Answer.WAIT_IF_KNOWN,
    redis_errors.ReadOnlyError: Answer.WAIT,
    redis_errors.OutOfMemoryError: Answer.FULL,
    redis_errors.NoScriptError: Answer.LOAD,
    redis_errors.BusyLoadingError: Answer.WAIT,
    redis_errors.MaxConnectionsError: Answer.WAIT,
    redis_errors.ConnectionError: Answer.WAIT,  # also when the server has as many clients as it accepts
    redis_errors.TimeoutError: Answer.WAIT,
    OSError: Answer.WAIT,
}
"""By redis-py's class, the more special ones first."""
NO_FUNCTION = "function not found"
IN_PIPELINE = " of pipeline caused error: "
"""redis-py puts this, and before it the command, in front of an error of a pipeline."""


def code_of(error: Exception) -> str:
    """The first word of the server's error, such as BUSY; redis-py removes it from errors that it has a class for."""
    return str(error).rpartition(IN_PIPELINE)[2].lstrip("('\"").partition(" ")[0]


def answer_to(error: Exception) -> Answer:
    """What the error asks for."""
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return Answer.WAIT_IF_KNOWN
    for kind, answer in BY_CLASS.items():
        if isinstance(error, kind):
            return answer
    if NO_FUNCTION in str(error).lower():
        return Answer.LOAD
    return BY_CODE.get(code_of(error), Answer.RAISE)
