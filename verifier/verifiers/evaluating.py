"""Owns what is known of scorers that run an answer as Python: which tasks of reasoning-gym have one, which answers run.

Must not run an answer.

A scorer evaluates text if it, or a function of its module that it calls, calls one of EVALUATORS or anything of sympy,
whose functions take texts as expressions and evaluate them. This is found in the installed package's source, so that a
new release is read again. Such a scorer is given an answer only if it has the form that its task asks for: numbers and
operators, a formula, or data. sympy rewrites a text before it evaluates it, so formulas are checked as texts: what is
not listed is refused.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

EVALUATORS = frozenset({"eval", "exec", "compile", "__import__", "import_module", "loads_pickle", "safe_eval"})
EVALUATING_PACKAGES = frozenset({"sympy", "numexpr", "z3", "pickle", "marshal", "importlib", "subprocess"})

NAMES_ONE = re.compile(rf"\b(?:{'|'.join(sorted(EVALUATORS | EVALUATING_PACKAGES))})\b")
"""A source without any of these evaluates nothing. A search is many times as fast as a parse, and every warm parent
reads the source of each task before it is ready."""

ELEMENTARY = frozenset(
    (
        *("abs", "acos", "acosh", "acot", "asec", "acsc", "asin", "asinh", "atan", "atanh", "cbrt", "ceiling", "cos"),
        *("cosh", "cot", "csc", "erf", "exp", "factorial", "floor", "log", "ln", "max", "min", "sec", "sign", "sin"),
        *("sinh", "sqrt", "tan", "tanh", "set", "frozenset", "tuple", "list"),
        *("Integral", "Abs", "erfc", "erfi", "Si", "Ci", "Ei", "li", "Li", "fresnelc", "fresnels", "gamma"),
        *("lowergamma", "uppergamma", "expint", "polylog"),
    )
)
"""The functions that a formula may call; oracles of integrals name some of the last."""

LITERAL = (ast.Expression, ast.Constant, ast.Load, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.USub)
MOST_CHARACTERS = 20_000
ARITHMETIC = re.compile(r"[0-9+\-*/(). \t]*")
FORMULA = re.compile(r"[A-Za-z0-9_+\-*/^().,| \t]*")
CALLED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*\(")
CALLED_VALUE = re.compile(r"\)[ \t]*\(")
ATTRIBUTE = re.compile(r"\.[ \t]*[A-Za-z_]")


def _is_literal(answer: str, oracle: str) -> bool:
    """Data without a name, or a text that is no expression of Python, which eval() rejects as well."""
    try:
        tree = ast.parse(answer, mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    return all(isinstance(node, LITERAL) for node in ast.walk(tree))


def _is_arithmetic(answer: str, oracle: str) -> bool:
    return bool(ARITHMETIC.fullmatch(answer))


def _is_formula(answer: str, oracle: str) -> bool:
    """A formula of numbers, names and elementary functions. An integral is one only if the oracle has one."""
    functions = ELEMENTARY if "Integral" in oracle else ELEMENTARY - {"Integral"}
    return (
        bool(FORMULA.fullmatch(answer))
        and "__" not in answer
        and functions.issuperset(CALLED.findall(answer))
        and not CALLED_VALUE.search(answer)
        and not ATTRIBUTE.search(answer)
    )


PLAIN: dict[str, Callable[[str, str], bool]] = {
    "countdown": _is_arithmetic,
    "puzzle24": _is_arithmetic,
    "intermediate_integration": _is_formula,
    "polynomial_multiplication": _is_formula,
    "simple_integration": _is_formula,
}
"""By task: whether (answer, oracle) may be evaluated; of all other tasks, only literals may."""


def is_plain(task: str, answer: str, oracle: str) -> bool:
    """Whether evaluating this answer can do nothing but compute a value. The oracle's own text always can."""
    answer = answer.strip()
    if answer == oracle.strip():
        return True
    return len(answer) <= MOST_CHARACTERS and PLAIN.get(task, _is_literal)(answer, oracle)


@cache
def evaluates(task: str) -> bool:
    """Whether the scorer of a task of reasoning-gym evaluates its answer. Raises ValueError for an unknown task."""
    from reasoning_gym import factory  # slow to import

    if task not in factory.DATASETS:
        raise ValueError(f"reference task: {task!r} is not valid: expected a task of reasoning-gym")
    kind = factory.DATASETS[task][0]
    modules = {sys.modules[base.__module__] for base in kind.__mro__ if base is not object}
    return any(_reaches_evaluator(module, "score_answer") for module in modules)


@cache
def _reaches_evaluator(module: ModuleType, start: str) -> bool:
    """Whether a function of this name in the module, or one that it calls there by name, evaluates text."""
    source = inspect.getsource(module)
    if not NAMES_ONE.search(unicodedata.normalize("NFKC", source)):  # as Python reads names in other letters
        return False
    tree = ast.parse(source)
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, []).append(node)
    dangerous = EVALUATORS | set(_imported(tree))
    waiting, seen = [start], {start}
    while waiting:
        for function in found.get(waiting.pop(), []):
            for name in _names(function):
                if name in dangerous:
                    return True
                if name in found and name not in seen:
                    seen.add(name)
                    waiting.append(name)
    return False


def _imported(tree: ast.AST) -> Iterator[str]:
    """The names that a module has from packages that evaluate texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in EVALUATING_PACKAGES:
            yield from (alias.asname or alias.name for alias in node.names)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in EVALUATING_PACKAGES:
                    yield alias.asname or alias.name.split(".")[0]


def _names(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        if isinstance(node, ast.Attribute):
            yield node.attr
