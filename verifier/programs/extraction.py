"""Owns what of a response is the program.

Must not parse a program: nested deep enough, it could end the process that parses it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

TAGS = frozenset(("python", "py", "python3"))
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>[^`\n]*)$")
LIST_ITEM = re.compile(r"^ *(?:[-*+]|\d{1,9}[.)]) {1,4}(?=\S)")
MORE_SPACES = 3
"""A fence or a list's mark may be indented this much more than what it stands in (CommonMark)."""
MOST_CHARACTERS = 1 << 18
INDENTED = re.compile(r"^[ \t]+\S")


class NoProgramError(Exception):
    """The response holds no program; the text says why."""


@dataclass
class _Block:
    """A fenced block. `indent`: of its first fence, in spaces; `tag`: its language in small letters, '' without any."""

    indent: int
    marks: str
    tag: str
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def program(self) -> str:
        """Its lines without the indentation that they share with the fence.

        Some models indent the fences in a list but not the code: the first line of code shows which.
        """
        first = next((line for line in self.lines if line.strip()), "")
        most = min(self.indent, _spaces(first))
        return "\n".join(line[min(most, _spaces(line)) :] for line in self.lines) + "\n"


def extracted(text: str) -> str:
    """The last block tagged as Python, else the last one without a tag, else the whole response if it has no fence.

    What follows the program without a tag is its output or its input. A block that is not closed was cut off by the
    limit of tokens, so it is no program. Raises NoProgramError.
    """
    blocks = _blocks(text)
    tagged = [block for block in blocks if block.tag in TAGS]
    candidates = tagged or [block for block in blocks if not block.tag]
    if blocks and not candidates:
        raise NoProgramError("no code block of Python in the response")
    if candidates and not candidates[-1].closed:
        raise NoProgramError("the last code block of the response is not closed")
    program = candidates[-1].program if candidates else text
    if not program.strip():
        raise NoProgramError("no code in the response")
    if len(program) > MOST_CHARACTERS:
        raise NoProgramError(f"the program has {len(program)} characters: expected at most {MOST_CHARACTERS}")
    return program


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks of a response; only the last one may be open."""
    blocks: list[_Block] = []
    current: _Block | None = None
    room = 0
    for line in text.splitlines():
        if current is None:
            room = _list_indent(line, room)
        found = FENCE.match(line)
        if found and len(found["indent"]) > room + MORE_SPACES:
            found = None  # a line of the code, such as one of a docstring
        if current is None:
            if found:
                words = found["language"].split()
                current = _Block(len(found["indent"]), found["marks"], words[0].lower() if words else "")
                blocks.append(current)
        elif found and not found["language"].strip() and len(found["marks"]) >= len(current.marks):
            current.closed, current = True, None
        else:
            current.lines.append(line)
    return blocks


def _list_indent(line: str, before: int) -> int:
    """How far the text of a list is indented after a line; 0 outside of lists. `before`: before the line."""
    if not line.strip():
        return before
    indent = _spaces(line)
    item = LIST_ITEM.match(line) if indent <= before + MORE_SPACES else None
    return item.end() if item else min(before, indent)


def _spaces(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def completed(program: str, prompt: str, entry_point: str) -> str:
    """The program for a prompt that ends inside of the function `entry_point`.

    A program that defines the function follows what the prompt has before it (imports and helpers); any other one is
    the rest of the prompt.
    """
    if defines(program, entry_point):
        return before_definition(prompt, entry_point) + "\n" + program
    first = next((line for line in program.splitlines() if line.strip()), "")
    if prompt and not INDENTED.match(first):  # a body whose block was written without the function's indentation
        program = "".join(f"    {line}" for line in program.splitlines(keepends=True))
    return prompt + ("" if prompt.endswith("\n") else "\n") + program


def defines(program: str, name: str) -> bool:
    """Whether a line of the program defines the name at the level of the module."""
    return _definition(name).search(program) is not None


def before_definition(prompt: str, name: str) -> str:
    """The prompt up to the definition of a name."""
    found = _definition(name).search(prompt)
    return prompt[: found.start()] if found else ""


def _definition(name: str) -> re.Pattern[str]:
    exact = re.escape(name)
    return re.compile(
        rf"^(?:(?:async[ \t]+)?def[ \t]+{exact}[ \t]*\(|class[ \t]+{exact}\b|{exact}[ \t]*=)", re.MULTILINE
    )


def digest(program: str) -> str:
    """The same for programs that differ only in white space at the ends of lines and in empty lines."""
    lines = (line.rstrip() for line in program.splitlines())
    return hashlib.sha256("\n".join(filter(None, lines)).encode(errors="replace")).hexdigest()[:16]
