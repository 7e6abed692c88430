"""Owns the shape of an answer's text: its parts at the top level, its brackets, and its letters.

Must not know what a part means.
"""

from __future__ import annotations

import re

BRACKET = re.compile(r"\\[{}]|\\langle|\\rangle|[()\[\]{}]")
OPENING = frozenset(("\\{", "\\langle", "(", "[", "{"))
SEPARATOR = re.compile(r"\\[{}]|\\langle|\\rangle|[()\[\]{}]|[,;]")
CONJUNCTION = re.compile(r"\s*,?\s+(?:and|or)\s+(?:either\s+)?", re.IGNORECASE)
MATRIX = re.compile(r"\\begin\s*\{([pb]?matrix|array)\}(?:\s*\{[lcr| ]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
RELATIONS = re.compile(
    r"\\(?:le|ge|ne|approx|in|implies)(?![A-Za-z])|<=|>=|!=|==|[<>=]|\\[{}]|\\langle|\\rangle|[()\[\]{}]"
)
SPELLED = {"<=": r"\le", ">=": r"\ge", "!=": r"\ne", "==": "="}
CHOICE = re.compile(
    r"(?:(?:the )?(?:correct )?(?:option|choice|answer|letter)\s*(?:is)?\s*:?\s*)?"
    r"(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Za-z])(?=\s*$|\s*[).:]))\s*[).:]?\s*(.*)",
    re.DOTALL | re.IGNORECASE,
)


AFFIRMED = re.compile(
    r"(?<=[A-Za-z)\]])\s+is (?:the )?(?:correct|right|best)(?: (?:answer|option|choice|one))?$", re.IGNORECASE
)
REMARKED = re.compile(r"([A-H])\s+\(([^()]+)\)")


def divided(text: str, places: list[tuple[int, int]]) -> list[str]:
    """The text between the given places (start, end)."""
    parts, at = [], 0
    for start, end in places:
        parts.append(text[at:start].strip())
        at = end
    parts.append(text[at:].strip())
    return parts


def top_level(text: str, pattern: re.Pattern[str]) -> list[tuple[int, int, str]]:
    """Where `pattern`, which also has to match every bracket, matches outside brackets: start, end, text."""
    found: list[tuple[int, int, str]] = []
    depth = 0
    for match in pattern.finditer(text):
        token = match[0]
        if BRACKET.fullmatch(token):
            depth += 1 if token in OPENING else -1
            depth = max(depth, 0)
        elif depth == 0:
            found.append((match.start(), match.end(), token))
    return found


def elements(text: str, bracketed: bool = False) -> list[str]:
    """The parts of a list, at commas or semicolons outside brackets; commas of thousands separate nothing.

    Where some commas have a space behind them, those separate and the others belong to numbers. Inside
    brackets (`bracketed`) a single comma always separates: (12,102) is a pair.
    """
    places = top_level(text, SEPARATOR)
    if not places:
        return [text.strip()]
    semicolons = [(start, end) for start, end, token in places if token == ";"]
    if semicolons:
        return divided(text, semicolons)
    spaced = [(start, end) for start, end, _ in places if text[end : end + 1] == " "]
    glued = [(start, end) for start, end, _ in places if text[end : end + 1] != " "]
    if spaced and glued and all(_thousands(text, start) for start, _ in glued):
        return divided(text, spaced)
    if not bracketed and not spaced and all(_thousands(text, start) for start, _ in glued):
        parts = divided(text, glued)
        if re.fullmatch(r"[^\d]{0,6}[1-9]\d{0,2}", parts[0]):
            return [text.strip()]
    return divided(text, [(start, end) for start, end, _ in places])


def _thousands(text: str, comma: int) -> bool:
    return bool(re.match(r"\d{3}(?!\d)", text[comma + 1 : comma + 5])) and text[comma - 1 : comma].isdigit()


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Opening bracket, inside and closing bracket, if one pair of brackets surrounds all of the text.

    An interval may mix brackets; ]0,1[ is written (0,1).
    """
    tokens = list(BRACKET.finditer(text))
    if len(tokens) < 2 or tokens[0].start() != 0 or tokens[-1].end() != len(text):
        return None
    opening, closing = tokens[0][0], tokens[-1][0]
    inside = text[tokens[0].end() : tokens[-1].start()].strip()
    if opening == "]" or closing == "[":
        pair = {"]": "(", "[": "[", "(": "("}.get(opening), {"[": ")", "]": "]", ")": ")"}.get(closing)
        return None if None in pair or "[" in inside or "]" in inside else (str(pair[0]), inside, str(pair[1]))
    depth = 0
    for token in tokens[:-1]:
        depth += 1 if token[0] in OPENING else -1
        if depth == 0:
            return None
    return (opening, inside, closing) if opening in OPENING and closing not in OPENING and depth == 1 else None


def rows_of_matrix(text: str) -> list[list[str]] | None:
    """The entries of a matrix by row, or None."""
    found = MATRIX.fullmatch(text)
    if found is None or "\\begin" in found[2]:
        return None
    rows = [row.strip() for row in found[2].split("\\\\")]
    return [[entry.strip() for entry in row.split("&")] for row in rows if row]


def relation(text: str) -> tuple[list[str], list[str]]:
    """The sides of a chain of relations, and the signs between them."""
    places = top_level(text, RELATIONS)
    sides = divided(text, [(start, end) for start, end, _ in places])
    return sides, [SPELLED.get(sign, sign) for _, _, sign in places]


def choice(text: str, remark: bool = False) -> tuple[str, str] | None:
    """The letter and the content of `(C) 5`, `C.`, `option C`, `C: 5`, with `remark` of `C (5)`; else None."""
    remarked = REMARKED.fullmatch(text) if remark else None
    if remarked is not None:
        return remarked[1], remarked[2].strip()
    found = CHOICE.fullmatch(AFFIRMED.sub("", text))
    if found is None:
        return None
    return (found[1] or found[2]).upper(), found[3].strip()
