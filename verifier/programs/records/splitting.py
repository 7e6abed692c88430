"""Owns the division of an assert: what the program computes inside of a jail, what is compared outside of it.

Must not put an expected value into what runs inside.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from itertools import pairwise

from verifier.programs.records.comparing import CONSTANTS, FUNCTIONS, NotEvaluatedError, dotted, evaluate

BUILTINS = frozenset(dir(builtins))
JUDGED_OUTSIDE = frozenset(("abs", "isclose", "math.isclose"))
"""Functions whose arguments hold the expected value: `math.isclose(f(2), 1.41)`."""


class NotSplitError(Exception):
    """An assert cannot be divided: it must run as a whole, in a process of its own."""


class Split:
    """An assert, divided. `inside`: expressions of the program's; `outside`: the rest, with value0, ... for them.

    `program`: the names that the program defines. Raises NotSplitError.
    """

    def __init__(self, test: ast.expr, program: Iterable[str]) -> None:
        self._program = frozenset(program)
        self.inside: list[str] = []
        self.outside = self._truth(test)

    def _truth(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, [self._truth(each) for each in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self._truth(node.operand))
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for one, other in pairwise(operands):
                if self._constant(one) == self._constant(other):  # both are the program's: it could make them equal
                    raise NotSplitError(f"both sides of {ast.unparse(node)!r} are computed")
            left, *others = map(self._operand, operands)
            return ast.Compare(left, node.ops, others)
        if isinstance(node, ast.Call) and dotted(node.func) in JUDGED_OUTSIDE - self._program:
            return self._operand(node)
        if isinstance(node, ast.Call) and _root(node.func) in self._program:
            return self._computed(node, truth=True)
        raise NotSplitError(f"{ast.unparse(node)!r} is not a comparison")

    def _operand(self, node: ast.expr) -> ast.expr:
        if self._constant(node):
            return node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            if self._constant(node.left) or self._constant(node.right):
                return ast.BinOp(self._operand(node.left), node.op, self._operand(node.right))
        elif isinstance(node, ast.Call) and dotted(node.func) in JUDGED_OUTSIDE - self._program:
            named = [ast.keyword(each.arg, self._operand(each.value)) for each in node.keywords]
            return ast.Call(node.func, [self._operand(each) for each in node.args], named)
        return self._computed(node)

    def _computed(self, node: ast.expr, truth: bool = False) -> ast.expr:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if not names & self._program or any(isinstance(each, ast.Compare) for each in ast.walk(node)):
            raise NotSplitError(f"{ast.unparse(node)!r} is not only the program's")
        source = ast.unparse(node)
        self.inside.append(f"bool({source})" if truth else source)
        return ast.Name(f"value{len(self.inside) - 1}")

    def _constant(self, node: ast.expr) -> bool:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        known = {name.partition(".")[0] for name in (*FUNCTIONS, *CONSTANTS)} - self._program
        if not names <= known:
            return False
        try:
            evaluate(node, {})
        except NotEvaluatedError:
            return False
        except Exception as error:  # noqa: BLE001 - an operation of the test's author can raise anything
            raise NotSplitError(f"{ast.unparse(node)!r} raises {type(error).__name__}") from None
        return True


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def free_names(body: Iterable[ast.AST]) -> set[str]:
    """The names that statements use and do not bind, except built-in ones."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return used - bound - BUILTINS
