"""Owns what of a response is the program.

Must not parse a program: nested deep enough, it could end the process that parses it.
"""

from __future__ import annotations

import hashlib
import re

LANGUAGES = frozenset(("", "python", "py", "python3"))
FENCE = re.compile(r"^ {0,3}(?P<marks>`{3,})[ \t]*(?P<language>[^`\n]*)$")
MOST_CHARACTERS = 1 << 18
INDENTED = re.compile(r"^[ \t]+\S")


class NoProgramError(Exception):
    """The response holds no program; the text says why."""


def extracted(text: str) -> str:
    """The last fenced block of Python, else the whole response if it has no fence. Raises NoProgramError.

    A block that is not closed was cut off by the limit of tokens, so it is no program.
    """
    blocks: list[str] = []
    open_fence: tuple[str, bool] | None = None
    content: list[str] = []
    fences = 0
    for line in text.splitlines():
        found = FENCE.match(line)
        if open_fence is None:
            if found:
                fences += 1
                words = found["language"].split()
                open_fence, content = (found["marks"], (words[0] if words else "").lower() in LANGUAGES), []
        elif found and not found["language"].strip() and len(found["marks"]) >= len(open_fence[0]):
            if open_fence[1]:
                blocks.append("\n".join(content) + "\n")
            open_fence = None
        else:
            content.append(line)
    if open_fence is not None and open_fence[1]:
        raise NoProgramError("the last code block of the response is not closed")
    if fences and not blocks:
        raise NoProgramError("no code block of Python in the response")
    program = blocks[-1] if blocks else text
    if not program.strip():
        raise NoProgramError("no code in the response")
    if len(program) > MOST_CHARACTERS:
        raise NoProgramError(f"the program has {len(program)} characters: expected at most {MOST_CHARACTERS}")
    return program


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
