"""A library that runs out of memory, stack or time leaves a verdict undecided, never wrong."""

import re

import math_verify
import math_verify.grader
import math_verify.parser
import pytest
import sympy

from verifier.verifiers.base import UndecidedError
from verifier.verifiers.math import symbolic
from verifier.verifiers.math.verdict import judge

EXHAUSTED = [MemoryError, RecursionError, TimeoutError, math_verify.errors.TimeoutException]


@pytest.fixture(autouse=True)
def _fresh_formulas():
    symbolic.parsed.cache_clear()
    yield
    symbolic.parsed.cache_clear()


def raising(error):
    def raises(*arguments, **named):
        raise error

    return raises


@pytest.mark.parametrize("error", EXHAUSTED)
@pytest.mark.parametrize("place", ["parse", "verify"])
def test_an_exhausted_call_is_undecided(monkeypatch, place, error):
    monkeypatch.setattr(math_verify, place, raising(error))
    with pytest.raises(UndecidedError, match=error.__name__):
        judge(r"\boxed{(x+1)^2}", {"answer": "x^2+2x+1"}, {})


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_an_error_that_the_parser_swallows_is_undecided(monkeypatch, error):
    monkeypatch.setattr(math_verify.parser, "latex2sympy", raising(error))
    with pytest.raises(UndecidedError, match=error.__name__):
        judge(r"\boxed{(x+1)^2 + 7}", {"answer": "x^2+2x+1"}, {})


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_an_error_that_the_comparison_swallows_is_not_wrong(monkeypatch, error):
    monkeypatch.setattr(math_verify.grader, "simplify", raising(error))
    assert judge(r"\boxed{(x+1)^2}", {"answer": "x^2+2x+1"}, {}).correct


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_running_out_while_evaluating_is_undecided(monkeypatch, error):
    monkeypatch.setattr(sympy.Expr, "evalf", raising(error))
    with pytest.raises(UndecidedError, match=error.__name__):
        judge(r"\boxed{(x+1)^2}", {"answer": "x^2+2x+1"}, {})


def test_other_errors_of_the_libraries_are_wrong(monkeypatch):
    monkeypatch.setattr(math_verify, "parse", raising(ValueError("no formula")))
    assert not judge(r"\boxed{(x+1)^2}", {"answer": "x^2+2x+1"}, {}).correct


def test_a_reference_is_parsed_once_for_all_responses(monkeypatch):
    calls = []
    parse = math_verify.parse

    def counted(text, *arguments, **named):
        calls.append(text)
        return parse(text, *arguments, **named)

    monkeypatch.setattr(math_verify, "parse", counted)
    for number in range(4):
        judge(rf"\boxed{{\sqrt{{x+{number + 2}}}}}", {"answer": r"\sqrt{x+1}"}, {})
    assert calls.count(r"$\sqrt{x+1}$") == 1


TOO_LARGE = [
    r"9^{9^{9^9}}",
    r"10^{10^{10}}",
    "1e999999999",
    r"\binom{10^9}{5*10^8}",
    "99999999!",
    "((9!)!)!",
    "(9^9)!",
    r"\binom{999*999*999}{999*999}",
    "2^{x^{99!}}",
    "x^{9^{9^9}}",
    "2^{2^{2^{2^{2^2}}}}",
    "1000!!",
    "9!!!",
    r"e^{e^{e^{9}}}",
    r"\pi^{\pi^{9}}",
    "e^e^e^9",
    r"\exp(999\cdot999\cdot999\cdot999)",
    r"\exp(\exp(\exp(9)))",
    r"\cosh(999\cdot999)",
    r"e^{999\pi\cdot999\cdot999}",
    r"(999e\cdot999\cdot999)!",
    r"x^{x^{x^{x^{x}}}}",
    "2^" * 60 + "2",
    "9" * 390 + "x",
    "(" * 40 + "x" + ")" * 40,
]


@pytest.mark.parametrize("formula", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_too_large_a_response_is_wrong(formula):
    found = judge(rf"\boxed{{{formula}}}", {"answer": "18"}, {})
    assert not found.correct
    assert "too large to compute" in found.reason


@pytest.mark.parametrize("formula", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_too_large_a_reference_is_undecided(formula):
    with pytest.raises(UndecidedError, match="not computed"):
        judge(r"\boxed{18}", {"answer": formula}, {})


@pytest.mark.parametrize("formula", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_too_large_a_formula_equals_itself(formula):
    assert judge(rf"\boxed{{{formula}}}", {"answer": formula}, {}).correct


PROGRAMS = [
    "__import__('os').system('id')",
    "x.__class__.__mro__",
    "(lambda: 5)()",
    "exec('5')",
    "[5 for _ in ()]",
    r"\write18{id}",
    r"\input{/etc/passwd}",
    r"\operatorname{eye}(10000)",
    r"\sum_{k=1}^{10^9} k",
    r"\int_0^1 x dx",
    "5; import os",
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("form", [r"\boxed{%s}", "Answer: %s", "Answer: $%s$"])
def test_nothing_but_formulas_reaches_the_libraries(monkeypatch, program, form):
    reached = []
    for name in ("parse", "verify"):
        monkeypatch.setattr(math_verify, name, lambda *arguments, **named: reached.append(arguments))
    for reference in ("7", "x+1", r"\text{east}"):
        assert not judge(form % program, {"answer": reference}, {}).correct
    texts = " ".join(str(arguments[0]) for arguments in reached)
    assert not re.search(r"_|import|lambda|exec|class|for|operatorname|write|input|sum|int", texts)
