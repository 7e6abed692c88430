"""Owns the tests of records whose tests are Python: MBPP's asserts, and HumanEval's function `check`.

Must not run them, and must not put one that cannot be divided into the program's process.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence

from verifier.programs.records.splitting import NotSplitError, Split, free_names
from verifier.programs.records.tasks import CheckedTest, ProgramTest, ValueTest

HARMLESS = (ast.Import, ast.ImportFrom, ast.Pass)
LEAVING = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.Await)
CANDIDATE = "candidate"


def human_eval_tests(test: ast.Module, entry_point: str, helpers: str) -> tuple[ProgramTest, ...]:
    """The tests of `check(candidate)`, each in a process of its own if all can be divided; empty without asserts.

    `helpers`: what the prompt defines, for test code that uses it; the program's own helpers are not trusted.
    """
    check = next((each for each in test.body if isinstance(each, ast.FunctionDef) and each.name == "check"), None)
    if check is None or len(check.args.args) != 1:
        return ()
    name = check.args.args[0].arg
    body = [each for each in check.body if not _says_nothing(each)]
    around = [each for each in test.body if each is not check]
    if not any(_asserts(each) for each in body):
        return ()
    imports = [each for each in (*around, *body) if isinstance(each, HARMLESS)]
    try:
        asserts = [each for each in body if not isinstance(each, HARMLESS)]
        return tuple(_divided(each, {name}, _source(imports), {name: entry_point}) for each in asserts)
    except NotSplitError:
        pass
    pieces = [(helpers, False), *((ast.unparse(each), False) for each in around if not _is_check_call(each))]
    if any(isinstance(node, LEAVING) for each in body for node in _own_nodes(each)):
        pieces += [(ast.unparse(check), False), (f"check({name})", True)]
    else:
        pieces += [(ast.unparse(each), _asserts(each)) for each in body]
    return (CheckedTest(tuple(pieces), {name: entry_point, entry_point: entry_point}),)


def mbpp_tests(
    asserts: Sequence[ast.Module], setup: ast.Module, imports: ast.Module, known: Iterable[str]
) -> tuple[ProgramTest, ...]:
    """One test per assert. `known`: the names that a solution defines, if the record has one."""
    return tuple(_mbpp_test(each, setup, imports, frozenset(known)) for each in asserts)


def _mbpp_test(test: ast.Module, setup: ast.Module, imports: ast.Module, known: frozenset[str]) -> ProgramTest:
    # The setup may build objects of the program's classes; what it binds is not the program's.
    names = free_names([imports, setup, test]) | (known & _used(test))
    if not names:  # a function that has the name of a built-in one, such as `sum`
        names = {found for found in [_called(test)] if found}
    own_setup = not free_names([imports, setup]) and not [each for each in setup.body if not isinstance(each, HARMLESS)]
    try:
        if own_setup and len(test.body) == 1:
            return _divided(test.body[0], names, _source(setup.body), {})
    except NotSplitError:
        pass
    context = [(ast.unparse(each), False) for each in (*imports.body, *setup.body)]
    pieces = [(ast.unparse(each), _asserts(each)) for each in test.body]
    return CheckedTest((*context, *pieces), {name: name for name in sorted(names)})


def _divided(statement: ast.stmt, program: set[str], setup: str, aliases: dict[str, str]) -> ValueTest:
    if not isinstance(statement, ast.Assert):
        raise NotSplitError("not an assert")
    split = Split(statement.test, program)
    if not split.inside:
        raise NotSplitError("nothing of it is the program's")
    return ValueTest(tuple(split.inside), split.outside, setup, aliases)


def _says_nothing(statement: ast.stmt) -> bool:
    """A docstring, or an assert of a constant that is true: it would pass for every program."""
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and bool(statement.test.value)
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _asserts(statement: ast.AST) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _own_nodes(statement: ast.AST) -> Iterable[ast.AST]:
    """Its nodes, without those of functions that it defines."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_nodes(child)


def _is_check_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _source(statements: Iterable[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, statements))


def _used(test: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}


def _called(test: ast.Module) -> str:
    """The first function that an assert calls and that is a built-in one by name."""
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return next((str(call.func.id) for call in calls if hasattr(builtins, call.func.id)), "")  # type: ignore[attr-defined]
