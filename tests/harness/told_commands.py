"""Owns how tests read the commands that a text tells people to run, and the check of those of `penstock` by its parser.

Must not run one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import typer.main

from deploy.cli.main import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
CONSOLE = re.compile(r"```console\n(.*?)```", re.S)
INLINE = re.compile(r"`((?:penstock|kubectl|helm|curl|redis-cli) [^`]+)`")
BETWEEN = frozenset({"|", "&", "&&", ";"})


def console_commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a Markdown text's console blocks; comments and redirections are gone."""
    for block in CONSOLE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from commands_of(line)


def inline_commands(text: str) -> Iterator[list[str]]:
    """The same of those in a Markdown text's lines."""
    for inline in INLINE.findall(CONSOLE.sub("", text)):
        yield from commands_of(" ".join(inline.split()))


def commands_of(line: str) -> Iterator[list[str]]:
    """The commands of one line of a shell. What `kubectl exec ... --` runs in a pod is a command too."""
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


def check_penstock(words: list[str], *, named: bool = False) -> None:
    """Asserts that `penstock ...` names a command, its options, all that are required, and its arguments.

    `named`: it may stand without any, as a sentence names a command.
    """
    told, (name, *rest) = " ".join(words), words[1:]
    assert name in COMMANDS, f"{told}: no command {name}"
    node = COMMANDS[name]
    if hasattr(node, "commands"):
        assert {*rest[:1]} & node.commands.keys(), f"{told}: one of {sorted(node.commands)} is missing"
        node, rest = node.commands[rest[0]], rest[1:]
    options = {
        flag: parameter for parameter in node.params if parameter.param_type_name == "option" for flag in parameter.opts
    }
    given = [word for word in rest if word.startswith("--")]
    assert set(given) <= options.keys() | {"--help"}, f"{told}: it knows {sorted(options)}"
    if named and len(rest) == len(given):
        return
    lacking = [
        parameter.name for parameter in node.params if parameter.required and parameter.param_type_name == "option"
    ]
    assert set(lacking) <= {options[parameter].name for parameter in given if parameter in options}, (
        f"{told}: needs {lacking}"
    )
    valued = sum(1 for word in given if word in options and not options[word].is_flag)
    arguments = [parameter.name for parameter in node.params if parameter.param_type_name == "argument"]
    assert len(rest) - len(given) - valued == len(arguments), f"{told}: takes {arguments}"
