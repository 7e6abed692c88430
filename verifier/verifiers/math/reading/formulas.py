"""Owns the alphabet of formulas: which texts may reach the symbolic library, and how large their numbers may be.

Must not evaluate a formula. latex2sympy builds sympy objects from a grammar and evaluates no Python; what remains
dangerous are numbers that it computes while it reads (powers, factorials, binomials) and depth of recursion.
"""

from __future__ import annotations

import re
from math import prod

from verifier.verifiers.math.reading.notation import balanced
from verifier.verifiers.math.reading.number_words import NUMBER_WORDS
from verifier.verifiers.math.reading.numerals import OversizeError, rational

LONGEST = 400
DEPTH = 30
DIGITS = 320  # of one number
EXPONENT = 1000
LARGEST_FACTORIAL = 1000
SCRIPTS = 40
TOWER = 2  # powers in an exponent with a variable

FUNCTIONS_WORDS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt lg det max min gcd lcm"
FUNCTIONS = frozenset(FUNCTIONS_WORDS.split())
GREEK_WORDS = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega pi ell"
)
GREEK = GREEK_WORDS.split()
OTHER_COMMANDS = "frac sqrt cdot times div infty pm mp binom circ lfloor rfloor lceil rceil overline bar vec hat angle"
COMMANDS = (
    frozenset(GREEK)
    | (FUNCTIONS - {"lg"})
    | frozenset(OTHER_COMMANDS.split())
    | frozenset(("arccot", "arcsec", "arccsc", "prime", "le", "ge", "ne"))
)
"""LaTeX commands that may reach the library."""

ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[pbv]?matrix\}|\\\\|&")
ALPHABET = re.compile(r"(?:[0-9A-Za-z\s.,+\-*/^_(){}\[\]|!'=<>°]|\\[A-Za-z]+|\\[{}|])+")
COMMAND = re.compile(r"\\([A-Za-z]+)")
RUN = re.compile(r"(?<![A-Za-z\\])[A-Za-z]+")
COMMON_WORDS = (
    "is it to be at of in on by he we so as an the are has had was and for per she her his you get all now out no yes "
    "if not can may our due who how why let two six ten one day any each than that this with from have into use go me "
    "my us up do did they them were will its per ago end men set sum way"
)
COMMON = frozenset(COMMON_WORDS.split()) | NUMBER_WORDS
BRACES = re.compile(r"[({\[]|[)}\]]")
NUMBER = re.compile(r"\d+")
EXPONENTIALS = re.compile(r"\\?(?:exp|sinh|cosh)(?![A-Za-z])\s*(?:\^\s*\{?\s*\d\s*\}?)?")
CONSTANTS = re.compile(r"\\pi(?![A-Za-z])|(?<![A-Za-z\\])(?:pi|e)(?![A-Za-z])")
POWER = re.compile(r"\^\s*(\{|-?\d+|\()?")


def is_formula(text: str) -> bool:
    """Whether the text is written in the alphabet of formulas and is no word or sentence."""
    if not text or len(text) > LONGEST:
        return False
    if "\\begin" in text:
        text = ENVIRONMENT.sub(" ", text)
    if not ALPHABET.fullmatch(text) or not balanced(text):
        return False
    if any(name not in COMMANDS for name in COMMAND.findall(text)):
        return False
    runs = RUN.findall(COMMAND.sub(" ", text))
    if any(_is_word(run) for run in runs):
        return False
    only_letters = re.fullmatch(r"[A-Za-z\s',.]+", text)
    if only_letters:
        return len(runs) == 1 and (len(runs[0]) == 1 or may_be_product(runs[0]))
    return bool(runs) or bool(re.search(r"\d|\\[A-Za-z]", text))


def _is_word(run: str) -> bool:
    """Whether a run of letters is a word, not a product of variables or a function."""
    lowered = run.lower()
    if lowered in FUNCTIONS:
        return False
    if any(lowered.startswith(name) and len(lowered) <= len(name) + 1 for name in FUNCTIONS if len(name) == 3):
        return False
    return len(run) > 3 or lowered in COMMON


def may_be_product(run: str) -> bool:
    """Whether bare letters are variables side by side, whose order does not matter: `xy`, `abc`. Others are words."""
    lowered = run.lower()
    return len(run) <= 3 and (set(lowered) <= set("abc") or not set(lowered) & set("aeiou"))


def is_label(text: str) -> bool:
    """Whether letters, or letters and digits, name something and multiply nothing: `ABC`, `B12`, `gym`, not `3xy`."""
    plain = re.sub(r"\s", "", text)
    return plain.isalnum() and bool(re.search(r"[A-Z]|[a-z]{3}", plain)) and not re.fullmatch(r"\d*[A-Za-z]", plain)


def refusal(text: str) -> str:
    """Why a formula is too large to compute, '' if it is not."""
    depth = deepest = 0
    for found in BRACES.finditer(text):
        depth += 1 if found[0] in "({[" else -1
        deepest = max(deepest, depth)
    if deepest > DEPTH:
        return f"it is nested deeper than {DEPTH}"
    if text.count("^") + text.count("_") > SCRIPTS:
        return f"it has more than {SCRIPTS} exponents"
    longest = max((len(run) for run in NUMBER.findall(text)), default=0)
    if longest > DIGITS:
        return f"it has a number of more than {DIGITS} digits"
    if re.search(r"\d[eE][-+]?\d{4,}", text):
        return "its power of ten may be too large"
    if re.search(r"!\s*!", text):
        return "its factorials may be too large"
    if ("!" in text or "\\binom" in text) and any(_is_large(argument) for argument in _combinatorial(text)):
        return "its factorials may be too large"
    for found in EXPONENTIALS.finditer(text):
        argument = re.match(r"\d*", text[found.end() :])
        opened = text[found.end() : found.end() + 1] in ("{", "(")
        if reason := _large_exponent(_group(text, found.end()) if opened else argument[0] if argument else ""):
            return reason
    return _large_powers(text)


def _combinatorial(text: str) -> list[str]:
    """What factorials and binomials are taken of."""
    found = [match[1] for match in re.finditer(r"(\d+)\s*!", text)]
    openings: list[int] = []
    for match in BRACES.finditer(text):
        if match[0] in "({[":
            openings.append(match.start())
        elif openings:
            group = text[openings.pop() : match.end()]
            if text[match.end() :].lstrip().startswith("!"):
                found.append(group)
    for match in re.finditer(r"\\binom\s*", text):
        upper = _group(text, match.end())
        found += [upper, _group(text, match.end() + len(upper))]
    return found


def _is_large(argument: str) -> bool:
    if re.search(r"[!^]|\\binom", argument) or _product(argument) > LARGEST_FACTORIAL:
        return True
    try:
        value = rational(argument)
    except OversizeError:
        return True
    return value.value > LARGEST_FACTORIAL if value else not re.search(r"[A-Za-z]", COMMAND.sub("", argument))


def _product(text: str) -> int:
    """The product of the numbers in a text, a bound of what they can make without powers."""
    return prod(max(int(run), 1) for run in NUMBER.findall(text))


def _large_powers(text: str) -> str:
    for found in POWER.finditer(text):
        start = found.end() - 1 if found[1] in ("{", "(") else found.start(1)
        exponent = _group(text, start) if found[1] in ("{", "(") else found[1]
        tail = text[start + len(exponent) if exponent else found.end() :].lstrip()
        if exponent is None:
            tail = re.sub(r"^(?:\\?[A-Za-z]+)", "", tail).lstrip()
        if tail.startswith("^"):
            return "its exponents may be too large"
        if exponent is not None and (reason := _large_exponent(exponent)):
            return reason
    return ""


def _large_exponent(exponent: str) -> str:
    """Why a power may be too large to compute, '' if it is not."""
    try:
        value = rational(exponent)
    except OversizeError:
        return "its exponents may be too large"
    if value is not None:
        return f"an exponent is greater than {EXPONENT}" if abs(value.value) > EXPONENT else ""
    exponent = EXPONENTIALS.sub("e^", exponent)
    variable = re.search(r"[A-Za-z]", COMMAND.sub(" ", CONSTANTS.sub(" ", exponent)))
    if "!" in exponent or exponent.count("^") > (TOWER if variable else 0):
        return "its exponents may be too large"
    numbers = [int(run) for run in NUMBER.findall(exponent)]
    if "^" in exponent and any(number > 10 for number in numbers):
        return "its exponents may be too large"
    if any(number > EXPONENT for number in numbers) or _product(exponent) > EXPONENT**2:
        return f"an exponent is greater than {EXPONENT}"
    return ""


def _group(text: str, opening: int) -> str:
    """The group that opens at a place, with its brackets; up to the end if it is not closed."""
    depth = 0
    for found in BRACES.finditer(text, opening):
        depth += 1 if found[0] in "({[" else -1
        if depth == 0:
            return text[opening : found.end()]
    return text[opening:]
