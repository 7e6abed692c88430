"""Owns the library of Redis functions: assembling it from lua/, loading it once, calling it.

Must not know what a function does.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from services.streams.connection.client import Redis
from services.streams.connection.signatures import Signature, SignatureError, parse_signature
from services.streams.retention import DEAD_KEPT, RELEASED_KEPT

log = logging.getLogger(__name__)

SHARED = "shared.lua"
GROWING = frozenset({"dispatch", "publish_sample", "redrive"})
"""Redis at its maxmemory rejects these. All others may exceed it: they are small, and work in flight must drain."""
CONSTANTS = {"RELEASED_KEPT": RELEASED_KEPT, "DEAD_KEPT": DEAD_KEPT}
"""What lua/ uses of services/streams/retention.py."""
SCRIPT_MEMORY = "OOM "


class FencedError(RuntimeError):
    """A newer owner of this role exists; the caller must stop."""


class RedisFullError(RuntimeError):
    """Redis is at its maxmemory and accepts no more data; nothing was changed. Repeat the call later."""


@dataclass(frozen=True)
class Library:
    """The functions as one Redis library: `code` as `FUNCTION LOAD` takes it (Redis 7.0, Valkey).

    `name` carries the digest of the code: in a rolling upgrade, the libraries of two releases live side by side.
    """

    name: str
    code: str
    signatures: Mapping[str, Signature]


@cache
def _sources() -> tuple[str, dict[str, str]]:
    """What all functions share, with the constants they use; and each function's source, by name."""
    folder = files("services.streams").joinpath("lua")
    functions = {
        source.name.removesuffix(".lua"): source.read_text()
        for area in folder.iterdir()
        if area.is_dir()
        for source in area.iterdir()
        if source.name.endswith(".lua")
    }
    constants = [f"local {name} = {value}\n" for name, value in CONSTANTS.items()]
    return "".join(constants) + folder.joinpath(SHARED).read_text(), dict(sorted(functions.items()))


@cache
def library() -> Library:
    """The library, assembled from lua/. Raises SignatureError for a source that does not declare its names."""
    shared, functions = _sources()
    signatures = {name: parse_signature(name, source) for name, source in functions.items()}
    nameless = _code("", shared, functions, signatures)
    name = "penstock_" + hashlib.sha256(nameless.encode()).hexdigest()[:12]
    return Library(name, _code(name, shared, functions, signatures), signatures)


def _code(library_name: str, shared: str, functions: dict[str, str], signatures: Mapping[str, Signature]) -> str:
    parts = [f"#!lua name={library_name}", shared]
    for name, source in functions.items():
        flags = "{}" if name in GROWING else "{'allow-oom'}"
        parts.append(
            f"redis.register_function{{function_name='{library_name}_{name}', flags={flags}, "
            f"callback=function(keys, args)\n{_lists(signatures[name])}{source}end}}"
        )
    return "\n".join(parts)


def _lists(signature: Signature) -> str:
    """The line that turns the lists of a call into Lua tables."""
    if not signature.has_lists:
        return ""
    declared = (signature.keys, signature.key_lists, signature.args, signature.arg_lists)
    return f"keys, args = with_lists(keys, args, {', '.join(str(len(names)) for names in declared)})\n"


async def load(redis: Redis) -> None:
    """Load the library unless this very code is there."""
    try:
        await redis.function_load(library().code)
    except ResponseError as error:
        if "already exists" not in str(error):
            raise


async def call(redis: Redis, function: str, /, **values: Any) -> int:
    """The integer reply of a function. Loads the library again where a server has lost it.

    `values`: every key and argument by the name that the function's source declares; a list for `..._keys` and
    `..._list`. Raises SignatureError for other names before anything is sent; FencedError, RedisFullError, and
    ResponseError for any other error of a function.
    """
    signature = library().signatures.get(function)
    if signature is None:
        raise SignatureError(f"Redis function {function!r} does not exist")
    keys, args = signature.order(values)
    try:
        try:
            return await _call(redis, function, keys, args)
        except ResponseError as error:
            if "function not found" not in str(error).lower():
                raise
            log.info("loading the functions %s into Redis", library().name)
            await load(redis)
            return await _call(redis, function, keys, args)
    except OutOfMemoryError as error:
        raise RedisFullError(f"Redis is at its maxmemory: {error}") from None
    except ResponseError as error:
        text = str(error)
        if text.startswith("FENCED"):
            raise FencedError(text) from None
        if text.startswith(SCRIPT_MEMORY):
            raise RedisFullError(f"Redis is at its maxmemory: {text}") from None
        raise


async def _call(redis: Redis, function: str, keys: list[Any], args: list[Any]) -> int:
    return int(await redis.fcall(f"{library().name}_{function}", len(keys), *keys, *args))
