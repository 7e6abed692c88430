"""The program that tries references: each kind's check, the order of answers, and references that end a process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from verifier.references import fault_of

ROOT = Path(__file__).parents[2]
ENTRY = {"question": "1 + 2?", "answer": "3", "metadata": {}}
BOTH = '{"all":["answer-line","pattern"]}'
TESTS = {"tests": [{"stdin": "1", "stdout": "1"}]}

DAMAGED = """
import os, sys, time
import verifier.references as references

def damage(reference, options):
    what = reference["answer"]
    if what == "loop": 3 ** (10 ** 10)
    if what == "wait": time.sleep(60)
    if what == "crash": os.abort()
    if what == "memory": bytearray(64 << 30)
    if what == "print": os.write(1, b"{}\\n{}\\n")
    if what == "exit": sys.exit(3)
    if what == "deep": damage({"answer": ["deep"]}, options) or deep()
    if what == "odd": raise ArithmeticError("odd\\nlines")

def deep():
    deep()

references.CPU_S, references.CLOCK_S = 0.5, 2.0
references.CHECKS = {**references.CHECKS, "answer-line": damage}
sys.exit(references.main())
"""


def requests(*pairs: tuple[str, Any]) -> bytes:
    return b"".join(
        json.dumps({"verifier": text, "reference": reference}).encode() + b"\n" for text, reference in pairs
    )


def run(asked: bytes, *program: str, timeout: float = 60.0) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, *(program or ("-m", "verifier.references"))]
    return subprocess.run(command, input=asked, capture_output=True, cwd=ROOT, timeout=timeout, check=False)


def faults(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    return [json.loads(line).get("fault", "") for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("verifier", "reference"),
    [
        ("math", {"answer": "4"}),
        ("math", {"answer": 4.5}),
        ("math", {"answer": "\\frac{1}{2}"}),
        ('{"math":{"last_number":true}}', {"answer": "4"}),
        ("answer-line", {"answer": "four"}),
        ("pattern", {"pattern": "a|b"}),
        ("reasoning-gym", {"task": "chain_sum", "entry": ENTRY}),
        ("code", TESTS),
        ("python:./rewards.py:score", {}),
        ("https://rewards/x", {"answer": None}),
        ('{"judge":{"model":"m","rubric":"./r.md","url":"https://j"}}', {"answer": [1]}),
        (BOTH, {"answer": "1", "pattern": "1"}),
    ],
)
def test_a_reference_that_can_be_read_has_no_fault(verifier: str, reference: dict[str, Any]) -> None:
    assert fault_of(verifier, reference) == ""


@pytest.mark.parametrize(
    ("verifier", "reference", "fault"),
    [
        ("math", {"answer": "\\frac{1}{"}, "reference answer: .* is not valid: expected"),
        ("math", {"answer": True}, "reference answer: True is not valid: expected"),
        ("math", {"answer": ["1"]}, "is not valid: expected"),
        (
            "answer-line",
            {"answer": "$"},
            r"reference answer: '\$' is not valid: expected a text or a number",
        ),
        ("answer-line", {"answer": {"a": 1}}, "reference answer: {'a': 1} is not valid: expected a text or a number"),
        ("answer-line", {"answer": False}, "reference answer: False is not valid"),
        (
            "pattern",
            {"pattern": "("},
            r"reference pattern: '\(' is not valid: expected a regular ex.*missing \)",
        ),
        ("pattern", {"pattern": "a" * 2001}, r"'aaa.*\.\.\. is not valid: expected .* at most 2000 characters"),
        ("pattern", {"pattern": "a{99999999999}"}, "is not valid: expected a regular expression"),
        ("pattern", {"pattern": 3}, "reference pattern: 3 is not valid"),
        (
            "reasoning-gym",
            {"task": "chain_sums", "entry": ENTRY},
            "reference task: 'chain_sums' is not valid",
        ),
        ("reasoning-gym", {"task": [1], "entry": ENTRY}, r"reference task: \[1\] is not valid"),
        (
            "reasoning-gym",
            {"task": "chain_sum", "entry": {"answer": None}},
            "reference entry: .* object with answer",
        ),
        ("reasoning-gym", {"task": "chain_sum", "entry": "3"}, "reference entry: '3' is not valid"),
        ("code", {"tests": []}, "is not valid: expected"),
        ("code", {}, "expected"),
        (BOTH, {"answer": "1", "pattern": "("}, "reference pattern"),
        (BOTH, {"answer": "1"}, "expected 'pattern'"),
        ("no such", {}, "verifier: 'no such' is not valid"),
    ],
)
def test_a_reference_that_cannot_be_read_has_one(verifier: str, reference: dict[str, Any], fault: str) -> None:
    found = fault_of(verifier, reference)
    assert found == " ".join(found.split())
    with pytest.raises(ValueError, match=fault):
        raise ValueError(found)
    assert len(found) <= 510


def test_a_long_value_does_not_hide_the_expectation() -> None:
    found = fault_of("math", {"answer": "\\frac{" * 3000})
    assert len(found) <= 510
    assert "is not valid: expected" in found


def test_answers_are_in_the_order_of_requests() -> None:
    entry = {"task": "chain_sum", "entry": ENTRY}
    done = run(requests(("math", {"answer": "1"}), ("pattern", {"pattern": "["}), ("reasoning-gym", entry)))
    assert done.returncode == 0
    assert done.stdout.splitlines()[::2] == [b"{}", b"{}"]
    assert "pattern" in faults(done)[1]
    assert run(b"").stdout == b""


def test_a_reference_that_ends_its_process_is_at_fault() -> None:
    asked = ["1", "loop", "2", "crash", "wait", "memory", "3", "print", "deep", "odd", "4"]
    done = run(requests(*(("answer-line", {"answer": answer}) for answer in asked)), "-c", DAMAGED)
    assert done.returncode == 0
    assert dict(zip(asked, faults(done), strict=True)) == {
        "1": "",
        "loop": "took longer than 5 s to read",
        "2": "",
        "crash": "ends the process that reads it (SIGABRT)",
        "wait": "took longer than 60 s by the clock to read",
        "memory": "raises MemoryError when it is read",
        "3": "",
        "print": "",
        "deep": "raises RecursionError when it is read: maximum recursion depth exceeded",
        "odd": "raises ArithmeticError when it is read: odd lines",
        "4": "",
    }


def test_a_program_that_cannot_work_says_so_by_its_status() -> None:
    done = run(requests(("answer-line", {"answer": "1"}), ("answer-line", {"answer": "exit"})), "-c", DAMAGED)
    assert (done.returncode, done.stdout) == (1, b"{}\n")
    assert b"SystemExit: 3" in done.stderr
    done = run(b"{\n")
    assert done.returncode == 1
    assert b"JSONDecodeError" in done.stderr


def test_hostile_answers_cost_little_time() -> None:
    texts = [
        "9" * 100_000,
        "9^{9^{9^{9}}}",
        "(" * 5000,
        "\\frac{" * 5000,
        "x^" * 3000,
        "a" * 1_000_000,
        "\\sqrt" * 9999,
    ]
    started = time.monotonic()
    done = run(requests(*(("math", {"answer": text}) for text in texts)))
    assert len(faults(done)) == len(texts)
    assert time.monotonic() - started < 45


@pytest.mark.slow
def test_seventeen_thousand_answers_take_seconds() -> None:
    asked = requests(*(("math", {"answer": str(number)}) for number in range(17_000)))
    started = time.monotonic()
    done = run(asked)
    assert faults(done) == [""] * 17_000
    assert time.monotonic() - started < 20
