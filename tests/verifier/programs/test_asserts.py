"""What of an assert the program sees: never what the test expects."""

import ast

import pytest

from verifier.programs.records.readers import task_of
from verifier.programs.records.splitting import NotSplitError, Split
from verifier.programs.records.tasks import CheckedTest, ValueTest


def split(source, program=("f",)):
    return Split(ast.parse(source).body[0].test, program)


DIVIDED = {
    "assert f(1) == 2": ["f(1)"],
    "assert 2 == f(1)": ["f(1)"],
    "assert f(1) == [1, (2, {3}), {'a': b'x'}]": ["f(1)"],
    "assert f(1) == -10 ** 9 + 7": ["f(1)"],
    "assert f(1) == set()": ["f(1)"],
    "assert f(1) == float('inf')": ["f(1)"],
    "assert f(1) is None": ["f(1)"],
    "assert f(1) is not True": ["f(1)"],
    "assert f(1)": ["bool(f(1))"],
    "assert not f(1)": ["bool(f(1))"],
    "assert f(1) in (1, 2)": ["f(1)"],
    "assert 0 < f(1) <= 5": ["f(1)"],
    "assert abs(f(1) - 3.5) < 1e-6": ["f(1)"],
    "assert math.isclose(f(1), 3.5, rel_tol=1e-3)": ["f(1)"],
    "assert sorted(f(1)) == sorted([3, 1])": ["sorted(f(1))"],
    "assert set(f(1)) == set([3, 1])": ["set(f(1))"],
    "assert f(1) == 2 and f(2) == 3": ["f(1)", "f(2)"],
    "assert f(lambda x: x + 1, 2) == 3": ["f(lambda x: x + 1, 2)"],
    "assert f(1).g(2)[0] == 3": ["f(1).g(2)[0]"],
    "assert f(1) == 2, 'a message'": ["f(1)"],
}


@pytest.mark.parametrize("source", DIVIDED)
def test_only_the_programs_part_runs_inside(source):
    assert split(source).inside == DIVIDED[source]


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) == f(2)",
        "assert f(1) == g",
        "assert all(f(n) == n for n in (1, 2))",
        "assert isinstance(f(1), int)",
        "assert (f(1) == 5) == True",
        "assert f(1) == [n for n in (1, 2)]",
        "assert np.allclose(f(1), [1, 2])",
        "assert 1 == 1",
        "assert f(1) == 1 if f(2) else 0",
    ],
)
def test_what_cannot_be_divided_is_not(source):
    with pytest.raises(NotSplitError):
        split(source)


def test_a_function_with_the_name_of_a_builtin_is_the_programs():
    [test] = task_of({"test_list": ["assert sum([1, 2]) == 3"]}).tests
    assert isinstance(test, ValueTest)
    assert test.inside == ("sum([1, 2])",)
    [checked] = task_of(
        {"test_list": ["assert abs(sum(1, 2)) == sum(1, 2)"], "code": "def sum(a, b): return a + b"}
    ).tests
    assert isinstance(checked, CheckedTest)
    assert checked.names == {"sum": "sum"}


CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert True, 'this prints'\n    {}\n"


def human_eval(line="assert candidate(2) == 3", around=""):
    return {"prompt": "def f(n):\n    ...\n", "entry_point": "f", "test": f"{around}\n{CHECK.format(line)}"}


def test_asserts_of_constants_are_no_tests():
    task = task_of(human_eval())
    assert task.count == 2
    assert all(isinstance(test, ValueTest) for test in task.tests)


def test_a_check_with_other_statements_runs_apart():
    [test] = task_of(human_eval("for n in (1, 2): assert candidate(n)")).tests
    assert isinstance(test, CheckedTest)
    assert test.count == 2
    assert test.names == {"candidate": "f", "f": "f"}


def test_no_expected_value_is_sent_to_the_program():
    for line in ("assert candidate(2) == 73514", "for n in (1, 2): assert candidate(n) == 73514 * n"):
        for test in task_of(human_eval(line, around="LIMIT = 73514")).tests:
            assert "73514" not in str(test.case())


def test_setup_code_that_builds_objects_runs_apart():
    record = {"test_list": ["assert f(root) == 3"], "test_setup_code": "root = Node(1)"}
    [test] = task_of(record).tests
    assert isinstance(test, CheckedTest)
    assert set(test.names) == {"Node", "f"}
