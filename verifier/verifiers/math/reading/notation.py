"""Owns the clean form of an answer's text: one spelling for each symbol, space, fraction and text command.

Must not interpret the text. Every function takes time proportional to the text's length.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from verifier.verifiers.math.reading.symbols import COMMANDS, FRACTIONS, SUBSCRIPTS, SUPERSCRIPTS, TRANSLATION

LONGEST = 2000
"""Characters of an answer that are read. The longest answer of MATH-500 has 159."""

TOKEN = re.compile(r"\\\\|\\([A-Za-z]+)\*?|\\([^A-Za-z])")
SPACES = {",": " ", ";": " ", ":": " ", ">": " ", " ": " ", "!": "\0", "/": "", "%": "%", "#": "#", "&": "&", "_": "_"}
MATH_MARKS = {"(": " ", ")": " ", "[": " ", "]": " "}
DOLLARS = re.compile(r"\$\$|\$")
FRAC_ARGUMENT = re.compile(r"\s*(?:(\d|[a-zA-Z]|\\[a-zA-Z]+)|(?=\{))")
DEGREE = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\circ(?=\s*[CF]\b)")
REALS = re.compile(r"\\(?:mathbb\s*(?:\{\s*R\s*\}|R)|R(?:eals)?(?![A-Za-z]))(?!\s*[\^_])")
SINGLE_STAR = re.compile(r"(?<!\*)\*(?!\*)")
BRACKETED_MODULUS = re.compile(r"\(\s*mod\s+(\w{1,20})\s*\)")
COLOR = re.compile(r"\\(?:text)?color\s*\{[^{}]{0,30}\}")
TEXT = re.compile(r"\\text\s*(?=\{)")
SUPERSCRIPT = re.compile(f"[{''.join(SUPERSCRIPTS)}]+")
SUBSCRIPT = re.compile(f"[{''.join(SUBSCRIPTS)}]+")
FRACTION = re.compile(f"[{''.join(FRACTIONS)}]")
PLAIN_NAMES = {"pi": r"\pi ", "infinity": r"\infty ", "inf": r"\infty ", "sqrt": r"\sqrt "}
PLAIN_NAME = re.compile(r"(?<![A-Za-z\\])(?:(?:pi|inf(?:inity)?)(?![A-Za-z])|sqrt(?=\s*[({\d]))")
ROOT_OF_GROUP = re.compile(r"\\sqrt\s*\(((?:[^()]|\([^()]{0,80}\)){1,80})\)")
PLAIN_POWER = re.compile(r"((?<![A-Za-z])[A-Za-z]|\d|\))\*\*(?=[\d({-])")
TIMES_TEN = re.compile(r"(?<=\d)\s+[xX]\s+(?=10\s*\^)")
SYNONYMS = {"dne": "does not exist", "do not exist": "does not exist", "doesnt exist": "does not exist"}
ARTICLES = re.compile(r"^(?:the|a|an)\s+", re.IGNORECASE)
BLANK = re.compile(r"\s+")
MARKDOWN = re.compile(r"\*\*|__(?=\S)|(?<=\S)__")


def _command(found: re.Match[str]) -> str:
    name, sign = found[1], found[2]
    if name is not None:
        written = COMMANDS.get(name)
        return f"\\{name}" if written is None else written
    if sign is None:
        return "\\\\"  # a matrix's next row
    if sign in SPACES:
        return SPACES[sign]
    return MATH_MARKS.get(sign, "\\" + sign)


def without_math_marks(text: str) -> str:
    """The text without the dollar signs around formulas; those before an amount stay.

    A pair surrounds a formula if no space follows the first and no digit follows the second, or the text is only that.
    """
    kept: list[str] = []
    at = 0
    opened: tuple[int, int] | None = None  # the place in `kept` and the place behind the sign
    for found in DOLLARS.finditer(text):
        if found[0] == "$$":
            kept += (text[at : found.start()], " ")
            opened, at = None, found.end()
            continue
        follows = text[found.end() : found.end() + 1]
        kept.append(text[at : found.start()])
        if opened is not None and not follows.isdigit() and text[opened[1] : found.start()].strip():
            kept[opened[0]] = " "
            kept.append(" ")
            opened = None
        else:
            opened = (len(kept), found.end())
            kept.append("$")
        at = found.end()
    return "".join(kept) + text[at:]


def _braced_arguments(text: str, command: str, count: int) -> str:
    """`\\frac12` as `\\frac{1}{2}`, `\\sqrt2` as `\\sqrt{2}`."""
    pieces = re.split(rf"{re.escape(command)}(?![A-Za-z])", text)
    kept = [pieces[0]]
    for piece in pieces[1:]:
        rest, written = piece, command
        for place in range(count):
            found = FRAC_ARGUMENT.match(rest)
            if found is None:
                break
            if found[1] is None:
                end = closing_brace(rest, found.end())
                if end < 0 or place == count - 1:
                    rest = rest[found.end() :]
                    break
                written += rest[found.end() : end + 1]
                rest = rest[end + 1 :]
            else:
                written += f"{{{found[1]}}}"
                rest = rest[found.end() :]
        kept.append(written + rest)
    return "".join(kept)


def closing_brace(text: str, opening: int) -> int:
    """The place of the brace that closes the one at `opening`, or -1. Escaped braces do not count."""
    depth = 0
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        if found[0] == "{":
            depth += 1
        elif found[0] == "}":
            depth -= 1
            if depth == 0:
                return found.start()
    return -1


def _unwrapped(text: str) -> str:
    """Without text commands and their braces; a space replaces each, so that words do not touch numbers."""
    openings: list[bool] = []
    kept: list[str] = []
    at = 0
    for found in re.compile(r"\\text\s*\{|\\text(?![A-Za-z])|\\.|[{}]", re.DOTALL).finditer(text):
        kept.append(text[at : found.start()])
        at = found.end()
        token = found[0]
        if token.startswith("\\text"):
            if token.endswith("{"):
                openings.append(True)
            kept.append(" ")
        elif token == "{":
            openings.append(False)
            kept.append(token)
        elif token == "}":
            kept.append(" " if openings and openings.pop() else token)
        else:
            kept.append(token)
    return "".join(kept) + text[at:]


def balanced(text: str) -> bool:
    """Whether each brace has its partner."""
    depth = 0
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _scripts(text: str) -> str:
    """Superscript and subscript characters as ^{...} and _{...}; fraction characters after a space."""
    text = SUPERSCRIPT.sub(lambda run: f"^{{{''.join(SUPERSCRIPTS[sign] for sign in run[0])}}}", text)
    text = SUBSCRIPT.sub(lambda run: f"_{{{''.join(SUBSCRIPTS[sign] for sign in run[0])}}}", text)
    return FRACTION.sub(lambda sign: f" {FRACTIONS[sign[0]]} ", text)


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """The text in one spelling: plain letters and digits, LaTeX only where nothing plain says it, single spaces."""
    text = text[:LONGEST]
    if text.isascii() and text.isalnum() and not PLAIN_NAME.search(text):
        return text
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _scripts(text).translate(TRANSLATION)).translate(TRANSLATION)
    text = text.translate(TRANSLATION).replace("\\$", "\x01")
    if "$" in text:
        text = without_math_marks(text)
    if not re.search(r"(?:^|\s)\*\*", text):  # no bold type
        text = PLAIN_POWER.sub(r"\1^", text)
    text = MARKDOWN.sub("", text)
    text = _typeset(text)
    if "\\" in text:
        if "\\begin" not in text:  # no rows of a matrix: a doubled backslash was escaped twice
            text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
        text = COLOR.sub("", text)
        text = DEGREE.sub("°", text)
        text = re.sub(r"\\[pb]?mod(?![A-Za-z])\s*\{\s*(\w{1,20})\s*\}", r" mod \1", text)
        text = REALS.sub(r"(-\\infty, \\infty)", text)
        text = TOKEN.sub(_command, text)
        text = re.sub(r"\0\s*", "", text)
        text = _unwrapped(text)
        text = _braced_arguments(text, r"\frac", 2)
        text = _braced_arguments(text, r"\sqrt", 1)
    text = text.replace("{,}", ",").replace("{.}", ".").replace("{}", "").replace("~", " ").replace("\x01", "$")
    text = BRACKETED_MODULUS.sub(r"mod \1", text)
    text = BLANK.sub(" ", text).strip()
    return _trimmed(text)


def _typeset(text: str) -> str:
    """`sqrt(2)`, `3pi`, `-infinity` and `1.5 x 10^3` in LaTeX."""
    text = PLAIN_NAME.sub(lambda name: PLAIN_NAMES[name[0]], text)
    text = ROOT_OF_GROUP.sub(r"\\sqrt{\1}", text)
    return TIMES_TEN.sub(r"\\times ", text)


def lacks_operand(whole: str, text: str) -> bool:
    """Whether a text ends with a star or an underscore that closes no emphasis on its `whole` line."""
    last = text.rstrip()[-2:]
    if last.endswith("_") and last != "__" and not whole.startswith(("*", "_")):
        return whole.count("_") % 2 == 1
    if not last.endswith("*"):
        return False
    if re.search(r"[\w)}][ \t]+\*[ \t]*$", text):
        return True
    if whole.startswith(("*", "_")) or text.rstrip().endswith("**"):
        return False
    return len(SINGLE_STAR.findall(whole)) % 2 == 1 or bool(re.search(r"[\w)}]\*(?=[\w({\\]).*[\w)}]\*[ \t]*$", text))


def _unquoted(text: str) -> str:
    """Without quotes and marks at the ends; an apostrophe behind a letter or digit without its pair is a prime."""
    text = text.strip(' "*_')
    quoted = text.startswith("'")
    text = text.lstrip(" \"'*_")
    return text if re.search(r"[\w)}]'+$", text) and not quoted else text.rstrip(" \"'*_")


def _trimmed(text: str) -> str:
    """Without quotes and closing punctuation around all of it."""
    previous = None
    while text != previous:
        previous = text
        if lacks_operand(text, text):
            return text
        text = _unquoted(text)
        text = text if text.endswith("...") else text.rstrip(".,;:").strip()
        if len(text) > 1 and text[0] == "{" and closing_brace(text, 0) == len(text) - 1 and "," not in text:
            text = text[1:-1]
    return text


def words(text: str) -> str:
    """Words in the form that is compared: lower case, no article, no punctuation at the ends, single spaces."""
    text = ARTICLES.sub("", re.sub(r"[\"'`.!]", "", text).strip())
    text = re.sub(r"[\s\-_]+", " ", text.replace("\\", " ")).strip(" ,;:()[]")
    text = text.casefold()
    return SYNONYMS.get(text, text)


def readable(text: str) -> bool:
    """Whether the text has a letter, a digit or a symbol that means something by itself."""
    return bool(re.search(r"[^\W_]|\\infty|\\emptyset", text))
