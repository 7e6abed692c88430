"""Owns the extraction of commands from documentation, and the check of `penstock` commands by its parser.

Must not run a command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module
from io import StringIO
from typing import Any

import typer.main

from benchmarks.__main__ import BENCHMARKS
from deploy.cli.main import app

ROOT = typer.main.get_command(app)
COMMANDS: dict[str, Any] = ROOT.commands  # type: ignore[attr-defined]
OF_ALL = {flag for parameter in ROOT.params for flag in parameter.opts}
"""The options before a command."""
CONSOLE = re.compile(r"```console\n(.*?)```", re.S)
INLINE = re.compile(r"`((?:penstock|kubectl|helm|curl|redis-cli) [^`]+)`")
BETWEEN = frozenset({"|", "&", "&&", ";"})


def console_commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a Markdown text's console blocks, without comments and redirections."""
    for block in CONSOLE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from commands_of(line)


def inline_commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a Markdown text's inline code."""
    for inline in INLINE.findall(CONSOLE.sub("", text)):
        yield from commands_of(" ".join(inline.split()))


def commands_of(line: str) -> Iterator[list[str]]:
    """The commands of one shell line. The command that `kubectl exec ... --` runs in a pod counts too."""
    lexer = shlex.shlex(re.sub(r"\$\(([^)]*)\)", "SUBSTITUTED", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in [*lexer, ";"]:
        if word in BETWEEN or word == "--":
            if words:
                yield [words[0].rpartition("/")[2], *words[1:]]
            words = []
        elif word in ("<", ">"):
            redirected = True
        elif redirected:
            redirected = False
        else:
            words.append(word)


def check_benchmark(command: str, words: list[str]) -> None:
    """Assert that `penstock bench [NAME ...]` names a benchmark and options that its own help lists."""
    if words[:1] in ([], ["NAME"]):
        return
    benchmark, *rest = words
    assert benchmark in BENCHMARKS, f"{command}: no benchmark {benchmark}, expected one of {sorted(BENCHMARKS)}"
    if given := {word for word in rest if word.startswith("--")}:
        known = {"--help", *re.findall(r"--[a-z][a-z-]*", benchmark_help(benchmark))}
        assert given <= known, f"{command}: unknown option, expected {sorted(known)}"


@cache
def benchmark_help(name: str) -> str:
    """What `penstock bench NAME --help` prints."""
    with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
        import_module(BENCHMARKS[name].module).main(["--help"])
    return printed.getvalue()


def check_penstock(words: list[str], *, named: bool = False) -> None:
    """Assert that `penstock ...` is a command with existing options, all required options, and its arguments.

    `named`: options and arguments may be missing, as in a sentence that mentions a command.
    """
    command, (name, *rest) = " ".join(words), words[1:]
    if name in OF_ALL:
        return
    assert name in COMMANDS, f"{command}: no command {name}"
    if name == "bench":
        check_benchmark(command, rest)
        return
    node = COMMANDS[name]
    if hasattr(node, "commands"):
        assert {*rest[:1]} & node.commands.keys(), f"{command}: one of {sorted(node.commands)} is missing"
        node, rest = node.commands[rest[0]], rest[1:]
    options = {
        flag: parameter for parameter in node.params if parameter.param_type_name == "option" for flag in parameter.opts
    }
    given = [word for word in rest if word.startswith("--")]
    assert set(given) <= options.keys() | {"--help"}, f"{command}: unknown option, expected {sorted(options)}"
    if named and len(rest) == len(given):
        return
    missing = [
        parameter.name for parameter in node.params if parameter.required and parameter.param_type_name == "option"
    ]
    assert set(missing) <= {options[parameter].name for parameter in given if parameter in options}, (
        f"{command}: needs {missing}"
    )
    valued = sum(1 for word in given if word in options and not options[word].is_flag)
    arguments = [parameter.name for parameter in node.params if parameter.param_type_name == "argument"]
    assert len(rest) - len(given) - valued == len(arguments), f"{command}: expected arguments {arguments}"
