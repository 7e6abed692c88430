"""Owns the figures of the code's structure: sizes, documentation, types, import cycles.

Must not judge them; test_house.py does. `python -m tests.house.figures` prints them.
"""

from __future__ import annotations

import ast
import asyncio
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from services.streams.connection.client import connect
from tests.harness.leased_task_route import leased_task_route
from tests.harness.servers.redis_servers import embedded_server
from tests.house.cycles import import_cycles

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "rollout", "verifier", "learner", "deploy", "penstock_client")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A class or a function: its file, and its number of lines."""

    file: str
    name: str
    lines: int


@dataclass(frozen=True)
class Signature:
    """A public function or method: whether it has a docstring, and whether it is typed completely."""

    file: str
    name: str
    documented: bool
    typed: bool


def tracked() -> list[str]:
    """Every file of the repository that is tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    return sorted(path for path in set(listed) if (ROOT / path).is_file())


def python_files(*folders: str) -> Iterator[str]:
    """The tracked Python files below these folders."""
    return (path for path in tracked() if path.endswith(".py") and path.split("/")[0] in folders)


def entries_per_folder(paths: list[str]) -> Counter[str]:
    """How many files and folders each folder contains directly. Files whose names start with a dot do not count."""
    entries = {
        (str(parent), path.relative_to(parent).parts[0])
        for path in map(PurePosixPath, paths)
        for parent in path.parents
    }
    return Counter(folder for folder, entry in entries if not entry.startswith("."))


def lines_of(file: str) -> int:
    """The number of lines of a file."""
    return len((ROOT / file).read_text().splitlines())


def definitions(files: Iterable[str], *kinds: type[ast.AST]) -> Iterator[Definition]:
    """Every class or function of these files."""
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, kinds) and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield Definition(file, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)


def signatures(files: Iterable[str]) -> Iterator[Signature]:
    """Every public function of a module, and every public method of a public class."""
    for file in files:
        module = ast.parse((ROOT / file).read_text())
        classes = [node for node in module.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for owner in (module, *classes):
            for node in owner.body:
                if isinstance(node, Function) and not node.name.startswith("_"):
                    yield Signature(file, node.name, ast.get_docstring(node) is not None, _typed(node))


def _typed(function: Function) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    free = [argument for argument in named if argument.arg not in ("self", "cls")] + starred
    return function.returns is not None and all(argument.annotation for argument in free)


def unformatted() -> int:
    """How often the formatter is switched off."""
    marks = [f"# fmt: {mark}" for mark in ("skip", "off")]
    texts = [(ROOT / file).read_text() for file in tracked() if file.endswith(".py")]
    return sum(text.count(mark) for text in texts for mark in marks)


async def _leased_task_route() -> list[str]:
    with embedded_server() as server:
        redis = await connect(f"redis://127.0.0.1:{server.port}/0")
        try:
            return await leased_task_route(redis, "figures")
        finally:
            await redis.aclose()


def main() -> None:
    """Print every figure."""
    product = list(python_files(*PACKAGES))
    largest = max(definitions(product, ast.ClassDef), key=lambda found: found.lines)
    longest = max(definitions(product, ast.FunctionDef, ast.AsyncFunctionDef), key=lambda found: found.lines)
    file = max(product, key=lines_of)
    public = list(signatures(product))
    folders = entries_per_folder([path for path in tracked() if not path.startswith("tests/")])
    folder, entries = folders.most_common(1)[0]
    print(f"files, lines            {len(product)}, {sum(map(lines_of, product))}")
    cycles = import_cycles(*PACKAGES)
    print(f"cycles of imports       {len(cycles)} {cycles or ''}")
    print(f"fullest folder          {entries} entries, {folder}")
    print(f"longest file            {lines_of(file)} lines, {file}")
    print(f"largest class           {largest.lines} lines, {largest.name} in {largest.file}")
    print(f"longest function        {longest.lines} lines, {longest.name} in {longest.file}")
    route = asyncio.run(_leased_task_route())
    print(
        f"leased task             {len(set(route))} files, {len(route) - len(set(route))} returns: {' > '.join(route)}"
    )
    documented = sum(found.documented for found in public) / len(public)
    typed = sum(found.typed for found in public) / len(public)
    print(f"documented              {documented:.1%} of {len(public)} public functions")
    print(f"typed                   {typed:.1%}")
    print(f"formatter switched off  {unformatted()} times")


if __name__ == "__main__":
    main()
