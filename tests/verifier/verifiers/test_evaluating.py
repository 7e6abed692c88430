"""Which scorers of reasoning-gym evaluate an answer, and which answers would run code."""

import sys
from contextlib import suppress
from functools import cache

import pytest
import reasoning_gym
from reasoning_gym import factory

from tests.verifier.sandbox.attacks import ATTACKS
from verifier.verifiers.evaluating import evaluates, runs_code
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


@pytest.mark.parametrize("task", evaluating_tasks())
def test_the_oracles_answers_are_never_refused(task):
    for entry in entries(task):
        found = judge(f"<answer>{entry['answer']}</answer>", {"task": task, "entry": entry}, {})
        assert not runs_code(str(entry["answer"]))
        assert found.score == 1.0, (entry["answer"], found)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("form", ["exec({!r})", "[exec({!r})]", "eval(compile({!r}, '', 'exec'))"])
def test_a_hostile_text_runs_code(name, form):
    assert runs_code(form.format(ATTACKS[name]))


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os')",
        "().__class__",
        "[c for c in ().__class__.__bases__]",
        "(lambda: 0)()",
        "f'{open}'",
        "f'{x.y}'",
        "open('/etc/passwd')",
        "print(1)",
        "a.b",
        "'a'.join(b)",
        "[1][0]",
        "sin(exec('1'))",
        "sin('exec(1)')",
        "Integer('__import__(\"os\")')",
        "getattr(x, 'y')",
        "x if y else z",
        "await x",
        "sin(x=1)",
        '\'__import__("os").system("true")\'',
        "x!.__class__",
        "exec ('1')",
        "2 x . y (z)",
        "1" * 30_000,
        "[" * 500 + "print(1)",
    ],
)
def test_an_answer_that_could_run_code(answer):
    assert runs_code(answer)


@pytest.mark.parametrize(
    "answer",
    [
        *("3*x**2/2 + C", "x**2*exp(x) - 2*sin(x)", "(1 + 2) * 3 / 4 - 5", "[[0, 1], [1, 0]]", "['1.5', '2']", "0xff"),
        *("A B C D", "1 2 3\n4 5 6", "_ Q _ _", "3.5", "-7", "2x + 3", "x = 4", "no idea", "I think it is 5.", ""),
        *("log(x)**2", "{'a': 1}", "(1, 2)", "True", "x*sqrt(2)"),
    ],
)
def test_an_answer_that_only_computes(answer):
    assert not runs_code(answer)


@pytest.mark.parametrize("task", evaluating_tasks())
def test_a_refused_answer_is_wrong(task):
    entry = entries(task)[0]
    found = judge("<answer>__import__('os')</answer>", {"task": task, "entry": entry}, {})
    assert (found.correct, found.score) == (False, 0.0)
    assert found.reason == "the answer would run code; it is not run"
