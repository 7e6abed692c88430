"""Owns the process that runs a program: its output, the values of expressions, or the calls that a checker asks for.

Must not know an expected value, and nothing here is trusted: the program can change all of it.
"""

from __future__ import annotations

import atexit
import builtins
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from verifier.programs.inside.encoding import decode, dumps, encode, loads

RESULTS, REQUESTS = 3, 4
"""Its file descriptors besides standard input, output and error."""
MESSAGE = 400


def run_output(program: Mapping[str, Any], case: Mapping[str, Any]) -> NoReturn:
    """Run it as a script, then exit as Python does: after threads and exit handlers, with its status."""
    status = 0
    try:
        _load(program, "__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:  # noqa: BLE001 - whatever it raised is its fault, and ends it
        _complain(error)
        status = 1
    try:
        shutdown = getattr(threading, "_shutdown", None)
        if shutdown is not None:
            shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - the same
        _complain(error)
        status = status or 1
    os._exit(status & 255)


def run_values(program: Mapping[str, Any], case: Mapping[str, Any]) -> NoReturn:
    """Write the value of each expression, one line each."""
    try:
        scope = _load(program, "solution", case)
        exec(compile(case["setup"], "setup.py", "exec"), scope)
        arguments = {"arguments": decode(case["arguments"])}
        for expression in case["expressions"]:
            value = eval(compile(expression.strip(), "test.py", "eval"), scope | arguments)
            _send(dumps([encode(value)]))
    except BaseException as error:  # noqa: BLE001 - whatever it raised is its fault, and ends it
        _send(dumps({"raised": describe(error)}))
    os._exit(0)


def serve_calls(program: Mapping[str, Any], case: Mapping[str, Any]) -> NoReturn:
    """Answer a checker's requests until it closes its pipe."""
    try:
        scope = _load(program, "solution", case)
        exec(compile(case["setup"], "setup.py", "exec"), scope)
    except BaseException as error:  # noqa: BLE001 - whatever it raised is its fault, and ends it
        _send(dumps({"raised": describe(error)}))
        os._exit(0)
    _send(dumps({"names": [name for name in case["names"] if name in scope]}))
    kept: list[object] = []

    def handle(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    with os.fdopen(REQUESTS, "rb") as requests:
        for line in requests:
            _send(dumps(_answer(loads(line), scope, kept, handle)))
    os._exit(0)


def _answer(
    request: dict[str, Any], scope: dict[str, Any], kept: list[object], handle: Callable[[object], int]
) -> dict[str, Any]:
    try:
        if request["operation"] == "name":
            return {"value": encode(scope[request["name"]], handle)}
        arguments = [decode(each, kept.__getitem__) for each in request["arguments"]]
        named = {name: decode(each, kept.__getitem__) for name, each in request["named"].items()}
        value = OPERATIONS[request["operation"]](*arguments, **named)
        # A function may change a list that it was given, and the test may look at that.
        changed = [encode(each, handle) if isinstance(each, list | dict | set) else None for each in arguments]
        return {"value": encode(value, handle), "arguments": changed}
    except BaseException as error:  # noqa: BLE001 - the checker raises it
        return {"raised": describe(error)}


def _call(function: Callable[..., object], *arguments: object, **named: object) -> object:
    return function(*arguments, **named)


OPERATIONS: dict[str, Callable[..., object]] = {
    "call": _call,
    "get": getattr,
    "iterate": iter,
    "next": next,
    "length": len,
    "item": operator.getitem,
    "equal": operator.eq,
    "text": str,
}
"""What a checker can do with an object of the program."""


def describe(error: BaseException) -> list[str]:
    """The name of an exception's type and its text, bounded."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - the program's own __str__
        text = ""
    return [type(error).__name__[:MESSAGE], text[:MESSAGE]]


def _load(program: Mapping[str, Any], name: str, case: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run the program as module `name`; returns its names, with the case's aliases."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # what the site module adds
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(program["before"], "imports.py", "exec"), module.__dict__)
    exec(compile(program["source"], "program.py", "exec"), module.__dict__)
    for alias, meant in (case or {}).get("aliases", {}).items():
        if meant not in module.__dict__:
            raise NameError(f"the program does not define {meant!r}")
        module.__dict__[alias] = module.__dict__[meant]
    return module.__dict__


def _send(line: bytes) -> None:
    while line:
        line = line[os.write(RESULTS, line) :]


def _complain(error: BaseException) -> None:
    kind, text = describe(error)
    os.write(2, f"\n{kind}: {text}\n".encode(errors="backslashreplace"))


KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], NoReturn]] = {
    "output": run_output,
    "values": run_values,
    "checked": serve_calls,
}
"""By the kind of a test: what the program's process does."""
