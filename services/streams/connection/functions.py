"""Owns the library of Redis functions: assembling it from lua/, loading it once, calling it.

Must not know what a function does.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from weakref import WeakKeyDictionary

from redis.exceptions import DataError, RedisError, ResponseError

from services.retry import Retry
from services.streams.connection.answers import Answer, answer_to
from services.streams.connection.client import RECONNECT_S, Redis
from services.streams.connection.signatures import Signature, SignatureError, parse_signature

log = logging.getLogger(__name__)

SHARED = "shared.lua"
PREFIX = "penstock_"
"""Of the names of all libraries; the rest is the digest of the code."""
GROWING = frozenset({"append_log", "create_record", "dispatch", "keep_partials", "publish_samples"})
"""Redis at its maxmemory rejects these. All others may exceed it: they are small, and work in flight must drain."""
READING = frozenset({"read_together"})
"""These write nothing, so that a Redis that refuses every write runs them too. Each call is sent alone."""
APPENDING = frozenset({"append_message", "append_fenced"})
"""These look for their message among the newest entries, in case they are repeated."""
ALONE = frozenset({"heartbeat", "renew_lease"})
"""Calls of these wait for none of another function: one connection that died silently holds all calls of its queue."""
TOGETHER_CALLS, TOGETHER_BYTES, TOGETHER_APPENDING = 256, 4 * 2**20, 32
"""The most calls, bytes, and calls of APPENDING functions (half of the entries that they look at) that are sent as one
command: Redis serves no other client while it runs them."""
REFUSING = 1
"""The maxmemory of a server that refuses new data because its volume is short of space: the chart's start script sets
it, and sets the former one again once there is space."""
LOAD_AGAIN_S = 1.0
BYTES_PER_KEY = 2048
"""Counted for each key: deleting one takes as long as writing so much."""
_TOGETHER = {False: "together", True: "together_growing"}
"""The function that runs several calls, by whether a full Redis rejects them."""


class FencedError(RuntimeError):
    """A newer owner of this role exists; the caller must stop."""


class RedisFullError(RedisError):
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
    """What all functions share; and each function's source, by name."""
    folder = files("services.streams").joinpath("lua")
    functions = {
        source.name.removesuffix(".lua"): source.read_text()
        for area in folder.iterdir()
        if area.is_dir()
        for source in area.iterdir()
        if source.name.endswith(".lua")
    }
    return folder.joinpath(SHARED).read_text(), dict(sorted(functions.items()))


@cache
def library() -> Library:
    """The library, assembled from lua/. Raises SignatureError for a source that does not declare its names."""
    shared, functions = _sources()
    signatures = {name: parse_signature(name, source) for name, source in functions.items()}
    nameless = _code("", shared, functions, signatures)
    name = PREFIX + hashlib.sha256(nameless.encode()).hexdigest()[:12]
    return Library(name, _code(name, shared, functions, signatures), signatures)


def _code(library_name: str, shared: str, functions: dict[str, str], signatures: Mapping[str, Signature]) -> str:
    parts = [f"#!lua name={library_name}", shared]
    for name, source in functions.items():
        parts.append(f"functions.{name} = function(keys, args)\n{_preamble(signatures[name])}{source}end")
        flags = "'allow-oom', 'no-writes'" if name in READING else "" if name in GROWING else "'allow-oom'"
        parts.append(_registered(f"{library_name}_{name}", f"functions.{name}", flags))
    for grows, name in _TOGETHER.items():
        parts.append(_registered(f"{library_name}_{name}", "together", "" if grows else "'allow-oom'"))
    return "\n".join(parts)


def _registered(name: str, callback: str, flags: str) -> str:
    return f"redis.register_function{{function_name='{name}', flags={{{flags}}}, callback={callback}}}"


def _preamble(signature: Signature) -> str:
    """What comes before a source: the lists of a call become Lua tables, and a caller that is not the owner leaves."""
    lines = ""
    if signature.has_lists:
        declared = (signature.keys, signature.key_lists, signature.args, signature.arg_lists)
        lines += f"keys, args = with_lists(keys, args, {', '.join(str(len(names)) for names in declared)})\n"
    if signature.is_fenced:
        lines += "local refused = fenced(keys[1], args[1])\nif refused then return refused end\n"
    return lines


async def load(redis: Redis) -> None:
    """Load the library unless this very code is there. Raises RedisFullError."""
    try:
        await redis.function_load(library().code)
    except ResponseError as error:
        if answer_to(error) is Answer.FULL:
            raise RedisFullError(await _unloaded(redis)) from None
        if "already exists" not in str(error):
            raise


async def _unloaded(redis: Redis) -> str:
    """Why Redis does not accept the functions of this release, and what to do."""
    needs = "does not accept the functions of this release, which every process needs"
    if int((await redis.info("memory")).get("maxmemory", 0)) == REFUSING:
        return f"Redis is short of space on its volume and {needs}: enlarge the volume, or free space"
    return f"Redis is at its maxmemory and {needs}, also to free memory: raise maxmemory, or delete keys"


@dataclass(frozen=True)
class _Call:
    """One call that waits to be sent, and its reply."""

    function: str
    keys: list[Any]
    args: list[Any]
    reply: asyncio.Future[Any]

    @property
    def grows(self) -> bool:
        return self.function in GROWING

    @property
    def size(self) -> int:
        """About how much work it is, in bytes."""
        values = sum(len(value) for value in self.args if isinstance(value, (str, bytes)))
        return values + BYTES_PER_KEY * len(self.keys)


class _CallQueue:
    """Calls of one client. Those that wait while others are in flight are sent as one command, in order."""

    def __init__(self) -> None:
        self._waiting: deque[_Call] = deque()
        self._in_flight: list[_Call] = []
        self._sender: asyncio.Task[None] | None = None

    async def run(self, redis: Redis, function: str, keys: list[Any], args: list[Any]) -> Any:
        call = _Call(function, keys, args, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(redis), name="calls of Redis functions")
        try:
            return await call.reply
        except asyncio.CancelledError:
            # Without a caller that still waits, an unavailable Redis need not be waited for.
            if self._sender is not None and all(other.reply.done() for other in (*self._in_flight, *self._waiting)):
                self._sender.cancel()
                self._reset()
            raise

    async def _send_all(self, redis: Redis) -> None:
        try:
            while self._waiting and self._sender is asyncio.current_task():
                self._in_flight = self._next()
                if self._in_flight:
                    await _send(redis, self._in_flight)
        finally:
            if self._sender is asyncio.current_task():  # else its callers are gone, and others have a sender of theirs
                self._reset()

    def _reset(self) -> None:
        """Cancel the calls that are left; the next call starts a sender of its own."""
        for call in (*self._in_flight, *self._waiting):
            call.reply.cancel()
        self._in_flight, self._sender = [], None
        self._waiting.clear()

    def _next(self) -> list[_Call]:
        """The calls of the next command; those whose caller was cancelled are dropped."""
        calls: list[_Call] = []
        size = appending = 0
        while self._waiting and len(calls) < TOGETHER_CALLS:
            call = self._waiting[0]
            size, appending = size + call.size, appending + (call.function in APPENDING)
            is_more = size > TOGETHER_BYTES or appending > TOGETHER_APPENDING
            if calls and (is_more or call.grows != calls[0].grows):
                break
            if not self._waiting.popleft().reply.done():
                calls.append(call)
        return calls


_queues: WeakKeyDictionary[Any, dict[str, _CallQueue]] = WeakKeyDictionary()
"""By client, then by function for those of ALONE, and "" for all others."""


async def call(redis: Redis, function: str, /, **values: Any) -> int:
    """The integer reply of a function. Loads the library again where a server has lost it.

    Calls that are made while another one of the same client is in flight are sent together, in the order of the calls;
    each has its own effect, reply and error. The client repeats a command whose reply was lost.

    `values`: every key and argument by the name that the function's source declares; a list for `..._keys` and
    `..._list`. Raises SignatureError for other names before anything is sent; FencedError, RedisFullError, and
    ResponseError for any other error of a function.
    """
    return int(await _reply(redis, function, values))


async def call_for_each(redis: Redis, function: str, /, **values: Any) -> list[Any]:
    """The reply of a function that has one for each element of its lists; otherwise like `call`."""
    reply: list[Any] = await _reply(redis, function, values)
    return reply


async def call_alone(redis: Redis, function: str, /, **values: Any) -> list[Any]:
    """The reply of a function of READING, which is sent in a command of its own; `values` as in `call`."""
    keys, args = _ordered(function, values)
    [reply] = await _replies(redis, [_Call(function, keys, args, asyncio.get_running_loop().create_future())])
    return list(reply)


def _ordered(function: str, values: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    signature = library().signatures.get(function)
    if signature is None:
        raise SignatureError(f"Redis function {function!r} does not exist")
    return signature.order(values)


async def _reply(redis: Redis, function: str, values: Mapping[str, Any]) -> Any:
    keys, args = _ordered(function, values)
    queue = _queues.setdefault(redis, defaultdict(_CallQueue))[function if function in ALONE else ""]
    try:
        return await queue.run(redis, function, keys, args)
    except ResponseError as error:
        match answer_to(error):
            case Answer.FENCED:
                raise FencedError(str(error)) from None
            case Answer.FULL:
                raise RedisFullError(f"Redis is at its maxmemory, or short of space on its volume: {error}") from None
        raise


async def _send(redis: Redis, calls: list[_Call]) -> None:
    """Send calls in one command, and hand each its reply or its error."""
    replies: list[Any]
    try:
        replies = await _replies(redis, calls)
    except (DataError, UnicodeError) as error:  # of an argument, so nothing was sent
        if len(calls) > 1:
            for call in calls:
                await _send(redis, [call])
            return
        replies = [error]
    except Exception as error:  # noqa: BLE001 - each caller raises it
        replies = [error] * len(calls)
    for call, reply in zip(calls, replies, strict=True):
        if call.reply.done():  # its caller was cancelled
            continue
        if isinstance(reply, Exception):
            call.reply.set_exception(reply)
        else:
            call.reply.set_result(reply)


async def _replies(redis: Redis, calls: list[_Call]) -> list[Any]:
    try:
        return await _fcall(redis, calls)
    except ResponseError as error:
        if answer_to(error) is not Answer.LOAD:
            raise
        log.info("loading the functions %s into Redis", library().name)
        full = Retry(lambda refused: isinstance(refused, RedisFullError), LOAD_AGAIN_S, RECONNECT_S)
        await full.run_async(lambda: load(redis))
        return await _fcall(redis, calls)


async def _fcall(redis: Redis, calls: list[_Call]) -> list[Any]:
    if len(calls) == 1:
        [only] = calls
        return [await redis.fcall(f"{library().name}_{only.function}", len(only.keys), *only.keys, *only.args)]
    keys = [key for call in calls for key in call.keys]
    sizes = [part for call in calls for part in (call.function, len(call.keys), len(call.args))]
    args = [arg for call in calls for arg in call.args]
    found: list[Any] = await redis.fcall(
        f"{library().name}_{_TOGETHER[calls[0].grows]}", len(keys), *keys, len(calls), *sizes, *args
    )
    return found
