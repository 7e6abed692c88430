"""Verdicts on records of each family."""

import base64
import json
import pickle
import zlib

import pytest

from verifier.programs.limits import ProgramLimits
from verifier.programs.verdict import check_reference

DOUBLE = "def double(n):\n    return 2 * n\n"
MBPP = {"test_list": ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(-3) == -6"]}
HUMAN_EVAL = {
    "prompt": "from typing import List\n\n\ndef total(values: List[int]) -> int:\n    '''The sum.'''\n",
    "entry_point": "total",
    "test": "META = {}\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
STDIN = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "5 5\n", "output": "10\n", "testtype": "stdin"},
]
FUNCTIONAL = [{"input": "[3, 1]\n2", "output": "[1, 3, 2]", "testtype": "functional"}]
ADD = "a, b = map(int, input().split())\nprint(a + b)"
SOLUTION = (
    "class Solution:\n    def merge(self, values: List[int], n: int) -> List[int]:\n        return sorted(values) + [n]"
)

RIGHT = {
    "MBPP": (DOUBLE, MBPP),
    "MBPP, with line ends of Windows": (DOUBLE.replace("\n", "\r\n"), MBPP),
    "MBPP, with imports": (
        "def root(n): return math.sqrt(n)",
        {"test_imports": ["import math"], "test_list": ["assert root(4) == 2"]},
    ),
    "MBPP, with a setup": (
        "class Node:\n    def __init__(self, n): self.n = n\ndef value(node): return node.n",
        {"test_setup_code": "node = Node(3)", "test_list": ["assert value(node) == 3", "assert node.n == 3"]},
    ),
    "MBPP, with challenges": (DOUBLE, MBPP | {"challenge_test_list": ["assert double(0) == 0"]}),
    "MBPP, changing its argument": (
        "def sort(values): values.sort()",
        {"test_list": ["values = [2, 1]\nsort(values)\nassert values == [1, 2]"]},
    ),
    "MBPP, raising": (
        "def fail(): raise ValueError('no')",
        {
            "test_list": [
                "try:\n    fail()\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'"
            ]
        },
    ),
    "MBPP, yielding": (
        "def count(n): yield from range(n)",
        {"test_list": ["assert all(a == b for a, b in zip(count(2), [0, 1]))"]},
    ),
    "HumanEval, a completion": ("    return sum(values)\n", HUMAN_EVAL),
    "HumanEval, a function": ("def total(values: List[int]) -> int:\n    return sum(values)\n", HUMAN_EVAL),
    "HumanEval, the whole prompt": (HUMAN_EVAL["prompt"] + "    return sum(values)\n", HUMAN_EVAL),
    "LiveCodeBench, stdin": (ADD, {"public_test_cases": STDIN[:1], "private_test_cases": json.dumps(STDIN[1:])}),
    "LiveCodeBench, functional": (SOLUTION, {"public_test_cases": FUNCTIONAL, "metadata": '{"func_name": "merge"}'}),
    "APPS, stdin": (ADD, {"input_output": json.dumps({"inputs": ["1 2\n"], "outputs": [["3"]]})}),
    "APPS, a function": (
        "def add(a, b): return a + b",
        {"input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}},
    ),
    "plain tests": ("print(float(input()) / 3)", {"tests": [{"stdin": "1", "stdout": "0.3333333"}]}),
    "plain asserts": (DOUBLE, {"asserts": MBPP["test_list"]}),
    "a main program": (
        "def main():\n    print(1)\nif __name__ == '__main__':\n    main()",
        {"tests": [{"stdout": "1"}]},
    ),
    "a data class": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\ndef f(): return P(1).x",
        {"asserts": ["assert f() == 1"]},
    ),
    "a program that exits": ("print(1)\nexit()", {"tests": [{"stdout": "1"}]}),
    "a program with threads": (
        "import threading\nthreading.Thread(target=print, args=(1,)).start()",
        {"tests": [{"stdout": "1"}]},
    ),
    "a long output": ("print('x\\n' * 100_000)", {"tests": [{"stdout": "x\n" * 100_000}]}),
    "a long input": (
        "import sys\nprint(len(sys.stdin.read()))",
        {"tests": [{"stdin": "x" * 3_000_000, "stdout": "3000000"}]},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
async def test_a_right_program_is_correct(judged, name):
    program, reference = RIGHT[name]
    check_reference(reference)
    found = await judged(program, reference)
    assert (found.correct, found.score) == (True, 1.0), found.reason
    assert found.answer


WRONG = {
    "a wrong value": (
        "def double(n): return 4",
        MBPP,
        1 / 3,
        "1 of 3 tests passed; first failure: test 2: expected 'aa', got 4",
    ),
    "an exception": ("def double(n): return 2 / n", MBPP, 0, "test 1: expected 4, got 1.0"),
    "no function": ("def other(n): return 4", MBPP, 0, "NameError: name 'double' is not defined"),
    "no Python": ("def double(n) return", MBPP, 0, "SyntaxError"),
    "an error when loading": ("1 / 0", MBPP, 0, "ZeroDivisionError: division by zero"),
    "a null byte": ("x = '\x00'", MBPP, 0, "null bytes"),
    "a wrong output": (ADD.replace("+", "-"), {"public_test_cases": STDIN}, 0, "test 1: expected '3', got '-1'"),
    "a part of the output": (
        ADD + "\nraise ValueError('late')",
        {"public_test_cases": STDIN},
        0,
        "exited with status 1: 'ValueError",
    ),
    "another status": (ADD + "\nimport sys; sys.exit(3)", {"public_test_cases": STDIN}, 0, "exited with status 3"),
    "brackets nested deep": ("x = " + "(" * 100_000, MBPP, 0, "raised"),
    "minus signs": ("x = " + "-" * 200_000 + "1", MBPP, 0, ""),
    "a chain of attributes": ("x = a" + ".b" * 100_000, MBPP, 0, ""),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_program_is_wrong_and_says_why(judged, name):
    program, reference, score, reason = WRONG[name]
    found = await judged(program, reference)
    assert not found.correct
    assert found.score == pytest.approx(score)
    assert reason in found.reason
    assert len(found.reason) <= 300
    assert found.reason.isascii()
    assert "\n" not in found.reason


async def test_without_partial_credit_a_score_is_0_or_1(judged):
    program = "def double(n): return 4"
    assert (await judged(program, MBPP, {"partial": False})).score == 0
    assert (await judged(DOUBLE, MBPP, {"partial": False})).score == 1


async def test_a_response_without_code_is_wrong(isolation):
    from verifier.programs.verdict import judge

    found = await judge("I cannot.\n```bash\nls\n```\n```sh\nx\n```", MBPP, {}, ProgramLimits())
    assert (found.correct, found.score, found.answer) == (False, 0.0, "")
    found = await judge("I do not know.", MBPP, {}, ProgramLimits())
    assert not found.correct
    assert "SyntaxError" in found.reason


async def test_a_program_that_spends_all_time_runs_no_later_test(judged):
    found = await judged("def double(n):\n    while n == 'a': pass\n    return 2 * n", MBPP, cpu_s=1)
    assert found.score == pytest.approx(1 / 3)
    assert "test 2: exceeded 1 s of CPU time" in found.reason


async def test_a_test_that_sends_a_function_is_unusable(judged):
    record = {"asserts": ["assert all(apply(g, n) == n for g in [lambda x: x] for n in (1, 2))"]}
    with pytest.raises(ValueError, match="a value of type function"):
        await judged("def apply(g, n): return g(n)", record)


async def test_verdicts_repeat(judged):
    program = "print(list({'a', 'b', 'c', 'd', 'e'}))"
    reasons = {(await judged(program, {"tests": [{"stdout": "no"}]})).reason for _ in range(4)}
    assert len(reasons) == 1


PICKLED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(STDIN)))).decode()
UNUSABLE = {
    "no field": ({"question": "x"}, r"reference: fields \['question'\] is not valid: expected prompt and test and"),
    "no test": ({"test_list": []}, "0 tests is not valid: expected 1 to"),
    "no list": ({"test_list": "assert 1"}, "test_list: 'assert 1' is not valid: expected a list of texts"),
    "no Python": ({"test_list": ["assert f("]}, "test_list: 'assert f.' is not valid: expected Python"),
    "a pickle": (
        {"private_test_cases": PICKLED},
        "private_test_cases: .* is not valid: expected JSON. The published .* pickle",
    ),
    "no check": (
        HUMAN_EVAL | {"test": "def test(): pass"},
        r"test: .* expected a function check\(candidate\) with asserts",
    ),
    "no name": (
        HUMAN_EVAL | {"entry_point": "a b"},
        "entry_point: 'a b' is not valid: expected the name of a function",
    ),
    "no function": ({"public_test_cases": FUNCTIONAL}, "metadata.func_name: None is not valid"),
    "a kind of test": (
        {"public_test_cases": [{"input": "", "output": "", "testtype": "x"}]},
        "testtype: 'x' is not valid",
    ),
    "lengths": ({"input_output": {"inputs": ["1"], "outputs": []}}, "lists `inputs` and `outputs` of one length"),
    "no output": ({"tests": [{"stdin": "1"}]}, "stdout: None is not valid: expected a text"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_reference_is_named(name):
    reference, message = UNUSABLE[name]
    with pytest.raises(ValueError, match=message):
        check_reference(reference)


async def test_an_unknown_option_is_named(judged):
    with pytest.raises(ValueError, match="option: 'language' is not valid: expected cpu_s"):
        await judged(DOUBLE, MBPP, {"language": "c"})
    with pytest.raises(ValueError, match="partial: 1 is not valid: expected true or false"):
        await judged(DOUBLE, MBPP, {"partial": 1})


def test_limits_come_from_options():
    assert ProgramLimits.from_options({"cpu_s": 2.0, "partial": True}) == ProgramLimits(cpu_s=2.0)
    with pytest.raises(ValueError, match="memory_mib: 0 is not valid: expected a number above 0"):
        ProgramLimits.from_options({"memory_mib": 0})
