"""Owns how a verifier's code enters a process: libraries of built-in ones, and functions of the user's.

Must not judge. A function of the user's is loaded in the confinement, because its file may do anything.

The user's files are never on a disk that the process reads: they come with its setup, and Python imports them from
there. A file beside the recipe may import another one by its name, if `verifier.files` lists it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from types import CodeType, ModuleType
from typing import Any

LIBRARIES: dict[str, tuple[str, ...]] = {
    "reasoning-gym": ("reasoning_gym",),
    "math": ("math_verify", "verifier.verifiers.math.verdict"),
    "python": ("traceback",),
}
"""What takes seconds to import, by kind: loaded before the first judgement, whose time is limited."""


WARM_UPS: dict[str, tuple[str, str]] = {"math": ("verifier.verifiers.math.warm_up", "warm_up")}
"""The function, by module and name, that fills the libraries' caches before the first judgement."""


class FunctionError(Exception):
    """A function of the user's cannot be loaded, or raised an exception. The text names file, function and line."""


def preload(kind: str) -> None:
    """Import the libraries of a built-in verifier, and fill their caches."""
    for library in LIBRARIES.get(kind, ()):
        importlib.import_module(library)
    if kind in WARM_UPS:
        module, function = WARM_UPS[kind]
        getattr(importlib.import_module(module), function)()


def load_function(name: str, files: Mapping[str, str]) -> Callable[..., Any]:
    """The function `./FILE.py:FUNCTION` of the `files`, or `PACKAGE.MODULE:FUNCTION` of an installed package.

    `files`: their sources, by name. Raises FunctionError.
    """
    sources = _Sources(files)
    sys.meta_path.insert(0, sources)
    where, _, function = name.rpartition(":")
    try:
        module = _imported(sources, _module_of(where)) if where.startswith("./") else importlib.import_module(where)
    except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, SystemExit too
        raise FunctionError(f"{name} cannot be loaded: {described(error, files)}") from None
    found = getattr(module, function, None)
    if not callable(found):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise FunctionError(f"{name} is not a function: {where} has {', '.join(known[:20]) or 'no function'}")
    return found  # type: ignore[no-any-return]


def _imported(sources: _Sources, name: str) -> ModuleType:
    """A file's module, even if another module of its name is loaded already: it may be called `verifier.py`."""
    if name not in sys.modules:
        return importlib.import_module(name)
    spec = sources.find_spec(name, None)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = importlib.util.module_from_spec(spec)
    sources.exec_module(module)
    return module


def described(error: BaseException, files: Mapping[str, str]) -> str:
    """An exception in one line, with the last place in the user's files that it passed."""
    place, trace = "", error.__traceback__
    while trace is not None:
        if (name := trace.tb_frame.f_code.co_filename) in files:
            place = f" ({name.removeprefix('./')}, line {trace.tb_lineno})"
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename and error.filename in files:
        place = f" ({error.filename.removeprefix('./')}, line {error.lineno})"
    text = " ".join(_said(error).split())[:200]
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _said(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return error.msg  # its str() has the place as well
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - the user's own class
        return f"its str() raises {type(second).__name__}"


def _module_of(file: str) -> str:
    parts = PurePosixPath(file.removeprefix("./")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


class _Sources(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the user's files by their names, before anything else of that name."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = {_module_of(file): file for file in files if file.endswith(".py")}
        self._sources = files
        parts = [name.split(".") for name in self._files]
        self._packages = {".".join(each[:n]) for each in parts for n in range(1, len(each))} - self._files.keys()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._files:
            file = self._files[fullname]
            return importlib.util.spec_from_loader(
                fullname, self, origin=file, is_package=file.endswith("/__init__.py")
            )
        if fullname in self._packages:
            return importlib.util.spec_from_loader(fullname, self, is_package=True)
        return None

    def get_source(self, fullname: str) -> str:
        return self._sources[self._files[fullname]] if fullname in self._files else ""

    def get_code(self, fullname: str) -> CodeType:
        file, source = self._files.get(fullname, f"<{fullname}>"), self.get_source(fullname)
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        return compile(source, file, "exec", dont_inherit=True)
