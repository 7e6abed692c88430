"""Owns text that is safe to print: what models, messages and people of other machines wrote may hold anything.

Must not print.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def plain(text: str) -> str:
    """One line without any character that a terminal obeys: each becomes its escape, a line break too."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def cell(text: str) -> Text:
    """The same for a table, where square brackets would be markup."""
    from rich.text import Text

    return Text(plain(text))
