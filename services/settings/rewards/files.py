"""Owns the check of the user's files that travel with a recipe: their names, their sizes, and that they can be used.

Must not read a file, nor run one: what it knows of a Python file comes from its syntax tree.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from services.contracts import REWARD_DIGESTS
from services.settings.faults import invalid
from services.settings.rewards.kinds import JudgeReward, PythonReward
from services.settings.rewards.reward import Reward

MOST_FILES = 32
MOST_BYTES = 256 * 1024
"""Of UTF-8, of one file."""
MOST_BYTES_TOGETHER = 1024 * 1024
SHOWN_NAMES = 8
SHOWN_CHARACTERS = 80


class FileUse(NamedTuple):
    """A file beside the recipe (`./rewards.py`), and the setting that names it.

    `function`: the function of it that the setting names, "" if none; `rubric`: whether it is a judge's rubric.
    """

    name: str
    setting: str
    function: str = ""
    rubric: bool = False


class _UnparsedError(ValueError):
    """A Python file that has no syntax tree; the value to show, and what is expected."""


def uses_of(setting: str, reward: Reward) -> Iterator[FileUse]:
    """The files that a reward uses, as the value of `setting`."""
    for single in reward.singles:
        for name in single.files:
            options = single.options
            function = options.function.rpartition(":")[2] if isinstance(options, PythonReward) else ""
            yield FileUse(name, setting, function, isinstance(options, JudgeReward))


def settings_by_file(uses: Iterable[FileUse]) -> dict[str, str]:
    """The first setting that names each file, by the file's name."""
    found: dict[str, str] = {}
    for use in uses:
        found.setdefault(use.name, use.setting)
    return found


def file_faults(uses: Sequence[FileUse], files: Mapping[str, str]) -> list[str]:
    """What is wrong with the texts that were given for the files of these uses, by name: one line per fault.

    Names first, then sizes, then contents; each is only looked at if what precedes it is right.
    """
    return _name_faults(settings_by_file(uses), files) or _size_faults(files) or list(_content_faults(uses, files))


def size_fault(name: str, size: int) -> str:
    """What is wrong with a file of so many bytes; "" if nothing is."""
    return invalid(_field(name), size, f"at most {MOST_BYTES} bytes of UTF-8") if size > MOST_BYTES else ""


def _name_faults(named: Mapping[str, str], files: Mapping[str, str]) -> list[str]:
    if len(named) > MOST_FILES:
        return [invalid("files", len(named), f"a recipe that names at most {MOST_FILES} of them")]
    given = _listed(files)
    faults = [
        f"files: {given} is not valid: expected {name!r}, which {setting} names"
        for name, setting in sorted(named.items())
        if name not in files
    ]
    known = f"one that the recipe names: {_listed(named)}" if named else "none, because the recipe names no file"
    extra = sorted(name for name in files if name not in named)[:SHOWN_NAMES]
    faults += [invalid("files", name[:SHOWN_CHARACTERS], known) for name in extra]
    return faults or [*_clashes(named)]


def _clashes(named: Mapping[str, str]) -> Iterator[str]:
    """The names that no folder of a run can hold."""
    for name, setting in named.items():
        if name == f"./{REWARD_DIGESTS}":
            yield invalid(setting, name, f"another name, because {REWARD_DIGESTS} in a run's folder lists its files")
        above = [other for other in named if name.startswith(f"{other}/")]
        if above:
            yield invalid(setting, name, f"no file below {above[0]!r}, which is a file itself")


def _size_faults(files: Mapping[str, str]) -> list[str]:
    faults, together = list[str](), 0
    for name, text in files.items():
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            faults.append(invalid(_field(name), text[error.start], "a text that can be written as UTF-8"))
            continue
        together += size
        if fault := size_fault(name, size):
            faults.append(fault)
    if not faults and together > MOST_BYTES_TOGETHER:
        faults.append(invalid("files", together, f"at most {MOST_BYTES_TOGETHER} bytes of all files together"))
    return faults


def _content_faults(uses: Iterable[FileUse], files: Mapping[str, str]) -> Iterator[str]:
    names: dict[str, frozenset[str] | None] = {}
    for name, text in files.items():
        if "\0" in text:
            yield invalid(_field(name), "\0", f"a text without NUL (it is character {text.index(chr(0)) + 1})")
        elif name.endswith(".py"):
            try:
                names[name] = _top_level_names(name, text)
            except _UnparsedError as error:
                yield f"{_field(name)}: {error}"
    for use in dict.fromkeys(uses):
        if use.rubric and not files[use.name].strip():
            yield invalid(_field(use.name), files[use.name][:SHOWN_CHARACTERS], f"the rubric that {use.setting} names")
        if use.function and (expected := _lacks(use.name, use.function, names.get(use.name))):
            yield invalid(use.setting, f"{use.name}:{use.function}", expected)


def expected_function(file: str, function: str, text: str) -> str:
    """What is expected in place of a function that a file (`./rewards.py`) does not define; "" if it may define it.

    `text`: of the file, which `file_faults` has found to be right.
    """
    return _lacks(file, function, _top_level_names(file, text))


def _lacks(file: str, function: str, known: frozenset[str] | None) -> str:
    if known is None or function in known:
        return ""
    has = _listed(sorted(name for name in known if not name.startswith("_")))
    return f"a function that {file!r} defines at top level: it has {has}"


@lru_cache(maxsize=MOST_FILES)  # rows with many forms of a reward name the same few files
def _top_level_names(name: str, source: str) -> frozenset[str] | None:
    """The names that a Python module defines; None if it may import any. Raises _UnparsedError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's source, such as an escape that Python does not know
            tree = ast.parse(source)
    except SyntaxError as error:
        lines = source.splitlines()
        line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
        where = f"line {error.lineno}: " if error.lineno else ""
        raise _UnparsedError(
            f"{line.strip()[:SHOWN_CHARACTERS]!r} is not valid: expected Python ({where}{error.msg})"
        ) from None
    except (RecursionError, MemoryError) as error:
        start = source.strip()[:SHOWN_CHARACTERS]
        raise _UnparsedError(
            f"{start!r} is not valid: expected Python with fewer levels of nesting ({type(error).__name__})"
        ) from None
    except ValueError as error:
        raise _UnparsedError(f"{source.strip()[:SHOWN_CHARACTERS]!r} is not valid: expected Python ({error})") from None
    found = frozenset(_defined(tree))
    return None if "*" in found else found


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that the module's own statements define, those inside `if`, `try`, `with` and loops too."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.alias():
                yield node.asname or node.name.partition(".")[0]
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                pass  # names of their own
            case _:
                waiting += ast.iter_child_nodes(node)


def _field(name: str) -> str:
    return f"files {name!r}"


def _listed(names: Iterable[str]) -> str:
    found = [name[:SHOWN_CHARACTERS] for name in names]
    shown = ", ".join(repr(name) for name in found[:SHOWN_NAMES])
    return f"{shown}, ..." if len(found) > SHOWN_NAMES else shown or "none"
