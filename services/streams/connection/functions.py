"""Owns the library of Redis functions: assembling it from lua/, loading it once, calling it.

Must not know what a function means.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from services.streams.connection.client import Redis

log = logging.getLogger(__name__)

SHARED = "shared.lua"
GROWING = frozenset({"dispatch", "publish_sample", "redrive"})
"""Refused by a Redis at its maxmemory. All others may pass it: they are small, and what is under way must drain."""
SCRIPT_MEMORY = "OOM "


class FencedError(RuntimeError):
    """A newer owner of this role exists; the caller must stop."""


class RedisFullError(RuntimeError):
    """Redis is at its maxmemory and takes no more; nothing was changed. Repeat the call when others have drained."""


@cache
def _sources() -> tuple[str, dict[str, str]]:
    """What all functions share, and each function's body, by name."""
    folder = files("services.streams").joinpath("lua")
    bodies = {
        source.name.removesuffix(".lua"): source.read_text()
        for area in folder.iterdir()
        if area.is_dir()
        for source in area.iterdir()
        if source.name.endswith(".lua")
    }
    return folder.joinpath(SHARED).read_text(), dict(sorted(bodies.items()))


@cache
def library_name() -> str:
    """The library's name carries the digest of its source: old and new code live side by side in a rolling upgrade."""
    shared, functions = _sources()
    return "penstock_" + hashlib.sha256(repr((shared, functions, sorted(GROWING))).encode()).hexdigest()[:12]


@cache
def library_code() -> str:
    """The library as `FUNCTION LOAD` takes it (Redis 7.0, Valkey)."""
    shared, functions = _sources()
    parts = [f"#!lua name={library_name()}", shared]
    for name, body in functions.items():
        flags = "{}" if name in GROWING else "{'allow-oom'}"
        parts.append(
            f"redis.register_function{{function_name='{library_name()}_{name}', flags={flags}, "
            f"callback=function(keys, args)\n{body}end}}"
        )
    return "\n".join(parts)


async def load(redis: Redis) -> None:
    """Load the library unless this very code is there."""
    try:
        await redis.function_load(library_code())
    except ResponseError as error:
        if "already exists" not in str(error):
            raise


async def call(redis: Redis, name: str, keys: list[str], args: list[Any]) -> int:
    """The function's integer reply. Loads the library once more where a server has lost it.

    Raises FencedError, RedisFullError, and ResponseError for anything else that a function refuses.
    """
    try:
        try:
            return await _call(redis, name, keys, args)
        except ResponseError as error:
            if "function not found" not in str(error).lower():
                raise
            log.info("loading the functions %s into Redis", library_name())
            await load(redis)
            return await _call(redis, name, keys, args)
    except OutOfMemoryError as error:
        raise RedisFullError(f"Redis is at its maxmemory: {error}") from None
    except ResponseError as error:
        text = str(error)
        if text.startswith("FENCED"):
            raise FencedError(text) from None
        if text.startswith(SCRIPT_MEMORY):
            raise RedisFullError(f"Redis is at its maxmemory: {text}") from None
        raise


async def _call(redis: Redis, name: str, keys: list[str], args: list[Any]) -> int:
    return int(await redis.fcall(f"{library_name()}_{name}", len(keys), *keys, *args))
