"""Owns the libraries of Redis functions that releases have loaded: which there are, and the deletion of one.

Must not know which are in use.
"""

from __future__ import annotations

from redis.exceptions import NoPermissionError, ResponseError

from services.streams.connection.client import Redis
from services.streams.connection.functions import PREFIX


class LibrariesForbiddenError(RuntimeError):
    """Redis does not allow this user to list or delete libraries."""


async def list_libraries(redis: Redis) -> set[str]:
    """The names of all libraries of any release. Raises LibrariesForbiddenError."""
    try:
        found = await redis.function_list(library=f"{PREFIX}*")
    except NoPermissionError as error:
        raise LibrariesForbiddenError(str(error)) from None
    return {dict(zip(about[::2], about[1::2], strict=True))[b"library_name"].decode() for about in found}


async def delete_library(redis: Redis, name: str) -> None:
    """Delete a library, unless it is gone. A process that still calls it loads its own again.

    Raises LibrariesForbiddenError.
    """
    try:
        await redis.function_delete(name)
    except NoPermissionError as error:
        raise LibrariesForbiddenError(str(error)) from None
    except ResponseError as error:
        if "not found" not in str(error).lower():
            raise
