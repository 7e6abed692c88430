"""Owns the process that runs a record's own test code, and calls the program in another process.

Must not run a byte of the program: what it gets from there is plain data, or a number that stands for an object.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator
from typing import Any, NoReturn

from verifier.programs.inside.encoding import Foreign, decode, dumps, encode, loads
from verifier.programs.inside.solution import describe

REQUESTS, REPLIES, RESULTS = 3, 4, 5
"""Its file descriptors: requests to the program, replies of it, results for the supervisor."""


class ProgramFailedError(Exception):
    """The program ended, or raised an exception of its own class."""


class UnsendableError(Exception):
    """The test gives the program something that is not plain data, such as a function: the record is unusable."""


class Connection:
    """The requests to the program's process, one at a time. A reply has at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._requests, self._replies = os.fdopen(REQUESTS, "wb", buffering=0), os.fdopen(REPLIES, "rb")
        self._most = most

    def names(self) -> list[str]:
        """The names that the program defines, of those that the test uses."""
        found = self._reply().get("names")
        return [str(name) for name in found] if isinstance(found, list) else []

    def named(self, name: str) -> object:
        """What the program calls by that name."""
        return self._asked({"operation": "name", "name": name}, [])

    def ask(self, operation: str, *arguments: object, **named: object) -> object:
        """The result of an operation in the program's process; raises what it raised there."""
        request = {
            "operation": operation,
            "arguments": [encode(each, _number) for each in arguments],
            "named": {name: encode(each, _number) for name, each in named.items()},
        }
        return self._asked(request, list(arguments))

    def _asked(self, request: dict[str, Any], arguments: list[object]) -> object:
        try:
            self._requests.write(dumps(request))
        except BrokenPipeError:
            raise ProgramFailedError("the program ended") from None
        reply = self._reply()
        changed = reply.get("arguments")
        for given, after in zip(arguments, changed if isinstance(changed, list) else [], strict=False):
            if after is not None:
                _change(given, decode(after, self._proxy))
        return decode(reply.get("value"), self._proxy)

    def _reply(self) -> dict[str, Any]:
        line = self._replies.readline(self._most)
        if not line.endswith(b"\n"):
            raise ProgramFailedError("the program ended" if len(line) < self._most else "a value is too large")
        reply = loads(line)
        if not isinstance(reply, dict):
            raise ProgramFailedError("the program wrote into its results")
        if "raised" in reply:
            raise _exception(reply["raised"])
        return reply

    def _proxy(self, number: int) -> object:
        return Proxy(self, number)


class Proxy:
    """An object in the program's process. It equals nothing but what that process calls equal among its own objects.

    So a test that compares it with a value can never be answered by the program.
    """

    _connection: Connection
    _number: int

    def __init__(self, connection: Connection, number: int) -> None:
        self.__dict__.update(_connection=connection, _number=number)

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._connection.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> object:
        return self._connection.ask("get", self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and self._connection.ask("equal", self, other) is True

    __hash__ = None  # type: ignore[assignment]  # as for every class with its own __eq__

    def __iter__(self) -> Iterator[object]:
        iterator = self._connection.ask("iterate", self)
        while True:
            try:
                yield self._connection.ask("next", iterator)
            except StopIteration:
                return

    def __len__(self) -> int:
        length = self._connection.ask("length", self)
        return length if isinstance(length, int) else -1

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, place: object) -> object:
        return self._connection.ask("item", self, place)

    def __str__(self) -> str:
        return str(self._connection.ask("text", self))


def check(job: bytes, most: int) -> NoReturn:
    """Run the pieces of a test in turn, and write for each that counts whether it passed. `job`: one line of JSON."""
    test = loads(job)
    scope: dict[str, Any] = {"__name__": "test"}
    connection = Connection(most)
    broken: list[str] | None = None
    try:
        defined = connection.names()
        for name, meant in test["names"].items():
            if meant in defined:
                scope[name] = connection.named(meant)
    except Exception as error:  # noqa: BLE001 - raised by the program
        broken = describe(error)
    for source, counts in test["pieces"]:
        found = broken or _failure(source, scope)
        broken = broken or (found if not counts else None)
        if counts:
            _report({"passed": found is None, "why": found})
    os._exit(0)


def _failure(source: str, scope: dict[str, Any]) -> list[str] | None:
    try:
        exec(compile(source, "test.py", "exec"), scope)
    except UnsendableError as error:
        _report({"unusable": str(error)})
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a test fails by any exception
        return describe(error)
    return None


def _report(line: dict[str, object]) -> None:
    os.write(RESULTS, dumps(line))


def _number(value: object) -> int:
    if isinstance(value, Proxy):
        return int(value.__dict__["_number"])
    if isinstance(value, Foreign):
        raise ProgramFailedError("the program wrote into its results")
    raise UnsendableError(f"the test gives the program a value of type {type(value).__name__}")


def _change(given: object, after: object) -> None:
    if isinstance(given, list) and isinstance(after, list):
        given[:] = after
    elif isinstance(given, dict | set) and isinstance(after, type(given)):
        given.clear()
        given.update(after)


def _exception(raised: object) -> Exception:
    """The built-in exception of that name, so that a test can expect it; never AssertionError."""
    kind, text = map(str, raised) if isinstance(raised, list) and len(raised) == 2 else ("", "")
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception) and found not in (AssertionError, UnicodeDecodeError):
        try:
            return found(text)
        except TypeError:  # a class whose constructor needs more than a text
            pass
    return ProgramFailedError(f"{kind}: {text}")
