"""Functions of the user's in the sandbox: what they may give, how they may fail, and what they leave behind."""

import pytest

from services.contracts import Outcome
from services.settings.rewards.reward import parse_text
from verifier.sandbox.pool import Sandbox, SandboxError
from verifier.verifiers.base import Candidate

REWARDS = """
import os, sys, time
import helper
from pack.inner import deep

seen = []

def same(messages, response, reference, metadata): return response == reference
def helped(messages, response, reference, metadata): return helper.half() * 2 * deep.ONE
def told(messages, response, reference, metadata):
    return {"score": 0.5, "correct": True, "reason": f"{messages} {reference} {metadata}", "answer": response}
def raises(messages, response, reference, metadata): raise ValueError("not\\nso")
def raises_deep(messages, response, reference, metadata): helper.fails()
def exits(messages, response, reference, metadata): sys.exit(0)
def ends(messages, response, reference, metadata): os._exit(0)
def aborts(messages, response, reference, metadata): os.abort()
def nan(messages, response, reference, metadata): return float("nan")
def two(messages, response, reference, metadata): return 2
def nothing(messages, response, reference, metadata): return None
def yes(messages, response, reference, metadata): return "yes"
def missing(messages, response, reference, metadata): import no_such_package
def never(messages, response, reference, metadata):
    while True: pass
def sleeps(messages, response, reference, metadata):
    while True: time.sleep(1)
def prints(messages, response, reference, metadata):
    for _ in range(1024): print("x" * (1 << 20))
    return True
def threads(messages, response, reference, metadata):
    import threading
    threading.Thread(target=print).start()
def forks(messages, response, reference, metadata): return os.fork() == 0
def sockets(messages, response, reference, metadata):
    import socket
    socket.create_connection(("127.0.0.1", 6379))
def reads(messages, response, reference, metadata): return open("/etc/passwd").read() != ""
def writes(messages, response, reference, metadata): open("/tmp/made", "w")
def odd_error(messages, response, reference, metadata):
    class Odd(Exception):
        def __str__(self): raise KeyError
    raise Odd
def leaves(messages, response, reference, metadata):
    import builtins, json
    found = len(seen) + hasattr(builtins, "left") + hasattr(json, "left") + ("left" in os.environ)
    seen.append(1); builtins.left = json.left = 1; os.environ["left"] = "1"; helper.half = lambda: 0
    reference["answers"].append(7)
    return {"score": 1 if found == 0 and reference["answers"] == [1, 7] else 0}
"""
HELPER = "def half(): return 0.5\ndef fails():\n    raise KeyError('k')\n"
FILES = {
    "./rewards.py": REWARDS,
    "./helper.py": HELPER,
    "./pack/inner/deep.py": "ONE = 1",
    "./verifier.py": "def score(m, t, r, d): return 1",
    "./math.py": "def score(m, t, r, d): return 1",
    "./whole/__init__.py": "from . import part\ndef score(m, t, r, d): return part.ONE",
    "./whole/part.py": "ONE = 1",
    "./broken.py": "x = 1\ndef score(:\n    pass\n",
    "./lacking.py": "import no_such_package\ndef score(m, t, r, d): return 1",
    "./exiting.py": "import sys\nsys.exit(0)",
    "./writing.py": "open('/tmp/made', 'w')",
    "./notes.txt": "not Python",
}


def function(name, file="rewards"):
    return parse_text(f"python:./{file}.py:{name}")


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(1, 2.0, files=FILES) as started:
        yield started


async def found_by(sandbox, name, text="x", reference=None, file="rewards"):
    candidate = Candidate(text, {"answer": "x"} if reference is None else reference, ({"role": "user"},), {"row": 1})
    return await sandbox.judge(function(name, file), candidate)


async def test_a_functions_value_is_the_finding(sandbox):
    assert (await found_by(sandbox, "same")).outcome is Outcome.CORRECT
    assert (await found_by(sandbox, "same", "y")).outcome is Outcome.WRONG
    assert (await found_by(sandbox, "helped")).score == 1.0
    told = await found_by(sandbox, "told", reference={"a": 1, "b": 2})
    assert (told.outcome, told.score, told.answer) == (Outcome.CORRECT, 0.5, "x")
    assert told.reason == "[{'role': 'user'}] {'a': 1, 'b': 2} {'row': 1}"


@pytest.mark.parametrize("file", ["verifier", "math", "whole/__init__"])
async def test_a_file_may_have_the_name_of_a_module_that_is_loaded(sandbox, file):
    found = await found_by(sandbox, "score", file=file)
    assert found.outcome is Outcome.CORRECT, found


async def test_a_function_of_an_installed_package():
    package = parse_text("python:operator:itemgetter")
    with Sandbox(1, 20.0, [package]) as sandbox:
        await sandbox.start()
        found = await sandbox.judge(package, Candidate("x", {"answer": 1}))
    assert found.reason.startswith("operator:itemgetter: it returned operator.itemgetter("), found


NAME = "./rewards.py:"
UNKNOWN = {
    "raises": f"{NAME}raises raised ValueError: not so (rewards.py, line 12)",
    "raises_deep": f"{NAME}raises_deep raised KeyError: 'k' (helper.py, line 3)",
    "exits": f"{NAME}exits raised SystemExit: 0 (rewards.py, line 14)",
    "ends": f"{NAME}ends: no judgement: the judging process failed: it has ended",
    "aborts": f"{NAME}aborts: no judgement: the judging process failed: it has ended",
    "nan": f"{NAME}nan: it returned nan (float), expected a bool",
    "two": f"{NAME}two: it returned 2 (int), expected a bool",
    "nothing": f"{NAME}nothing: it returned None (NoneType), expected a bool",
    "yes": f"{NAME}yes: it returned 'yes' (str), expected a bool",
    "missing": f"{NAME}missing raised ModuleNotFoundError: No module named 'no_such_package' (rewards.py, line 21)",
    "never": f"{NAME}never: no judgement within 2 s of CPU time",
    "threads": f"{NAME}threads raised RuntimeError: can't start new thread",
    "forks": f"{NAME}forks raised PermissionError",
    "sockets": f"{NAME}sockets raised PermissionError",
    "reads": f"{NAME}reads raised PermissionError",
    "writes": f"{NAME}writes raised PermissionError",
    "odd_error": f"{NAME}odd_error raised Odd",
}


@pytest.mark.parametrize("name", UNKNOWN)
async def test_a_function_that_fails_gives_no_verdict(sandbox, name):
    found = await found_by(sandbox, name)
    assert found.outcome is Outcome.UNKNOWN
    assert found.reason.startswith(UNKNOWN[name])
    assert (await found_by(sandbox, "same")).outcome is Outcome.CORRECT


@pytest.mark.slow
async def test_a_function_that_sleeps_for_ever_ends_by_the_clock(sandbox):
    assert (await found_by(sandbox, "sleeps")).reason == f"{NAME}sleeps: no judgement within 20 s"


async def test_a_function_may_print_a_gigabyte(sandbox):
    assert (await found_by(sandbox, "prints")).outcome is Outcome.CORRECT


async def test_a_function_finds_nothing_of_the_previous_text(sandbox):
    for _ in range(3):
        assert (await found_by(sandbox, "leaves", reference={"answers": [1]})).score == 1.0


FAULTY = {
    "score@broken": "./broken.py:score cannot be loaded: SyntaxError: invalid syntax (broken.py, line 2)",
    "score@lacking": "ModuleNotFoundError: No module named 'no_such_package' (lacking.py, line 1)",
    "score@exiting": "./exiting.py:score cannot be loaded: SystemExit: 0 (exiting.py, line 2)",
    "score@writing": "./writing.py:score cannot be loaded: PermissionError: [Errno 1] Operation not permitted",
    "absent@rewards": "./rewards.py:absent is not a function: ./rewards.py has same, helped, told",
    "seen@rewards": "./rewards.py:seen is not a function",
    "score@nowhere": "./nowhere.py:score cannot be loaded: ModuleNotFoundError: No module named 'nowhere'",
}


@pytest.mark.parametrize("name", FAULTY)
async def test_a_function_that_cannot_be_loaded_is_an_error(name):
    function_name, _, file = name.partition("@")
    with Sandbox(1, 20.0, [function(function_name, file)], files=FILES) as sandbox:
        with pytest.raises(SandboxError) as raised:
            await sandbox.start()
        assert FAULTY[name] in str(raised.value)
        for _ in range(5):
            found = await found_by(sandbox, function_name, file=file)
            assert found.outcome is Outcome.UNKNOWN
            assert FAULTY[name] in found.reason
