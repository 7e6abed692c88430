"""Owns what is known of scorers that run an answer as Python: which tasks of reasoning-gym have one, which answers run.

Must not run an answer.

A scorer evaluates text if it, or a function of its module that it calls, calls one of EVALUATORS or anything of sympy,
whose functions take texts as expressions and evaluate them. This is found in the installed package's source, so that a
new release is read again. An answer is harmless for such a scorer if it holds only data and elementary arithmetic.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

EVALUATORS = frozenset({"eval", "exec", "compile", "__import__", "import_module", "loads_pickle", "safe_eval"})
EVALUATING_PACKAGES = frozenset({"sympy", "numexpr", "z3", "pickle", "marshal", "importlib", "subprocess"})

ELEMENTARY = frozenset(
    (
        *("abs", "acos", "acosh", "acot", "asec", "acsc", "asin", "asinh", "atan", "atanh", "cbrt", "ceiling", "cos"),
        *("cosh", "cot", "csc", "erf", "exp", "factorial", "floor", "log", "ln", "max", "min", "sec", "sign", "sin"),
        *("sinh", "sqrt", "tan", "tanh", "set", "frozenset", "tuple", "list"),
        *("Integral", "Abs", "erfc", "erfi", "Si", "Ci", "Ei", "li", "Li", "fresnelc", "fresnels", "gamma"),
        *("lowergamma", "uppergamma", "expint", "polylog"),
    )
)
"""The functions that an answer may call, on numbers and names; oracles of integrals name some of the last."""

DATA = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Call),
    *(ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
MOST_CHARACTERS = 20_000
ATTRIBUTE = re.compile(r"[\w)\]}'\"!]\s{0,9}\.\s{0,9}[^\W\d]")
CALLED = re.compile(r"([^\W\d]\w{0,99})\s{0,9}!?\(")
QUOTES = re.compile("['\"]")


def runs_code(answer: str) -> bool:
    """Whether evaluating this answer could do more than compute a value.

    Attributes, subscripts, comprehensions, f-strings and calls of other functions than elementary ones could; so could
    a text inside an answer that looks like a call, because sympy evaluates texts too.
    """
    if len(answer) > MOST_CHARACTERS:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError):  # eval() rejects it too, sympy may rewrite it first
        return _suspicious(answer)
    except (RecursionError, MemoryError):
        return True
    return any(_unsafe(node) for node in ast.walk(tree))


def _unsafe(node: ast.AST) -> bool:
    if not isinstance(node, DATA):
        return True
    if isinstance(node, ast.Name):
        return "__" in node.id
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes) and _suspicious(str(node.value))
    if isinstance(node, ast.Call):
        elementary = isinstance(node.func, ast.Name) and node.func.id in ELEMENTARY
        texts = any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))
        return not elementary or bool(node.keywords) or texts
    return False


def _suspicious(text: str) -> bool:
    called = CALLED.findall(text)
    return (
        "__" in text
        or bool(ATTRIBUTE.search(text) and called)
        or any(name not in ELEMENTARY for name in called)
        or bool(called and QUOTES.search(text))
    )


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
    tree = ast.parse(inspect.getsource(module))
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
