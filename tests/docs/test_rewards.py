"""The example at the top of docs/rewards.md, run by its own command in an empty folder."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def block(language):
    """The first block of this language on the page."""
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.S)[1]


def words(line):
    """A row of a table; its fourth word, the milliseconds, differs from run to run."""
    found = line.split()
    return [*found[:3], *found[4:]] if found and found[0].isdigit() else found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(block("python"))
    (tmp_path / "train.jsonl").write_text(block("json"))
    return tmp_path


def penstock(folder, *arguments):
    command = [str(Path(sys.executable).with_name("penstock")), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_example_prints_what_the_page_shows(folder):
    lines = [line for line in block("python").splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 10
    done = penstock(folder, *shlex.split(block("console"))[1:])
    assert (done.returncode, done.stderr) == (0, "")
    shown = [words(line) for line in done.stdout.splitlines() if line.strip() and "──" not in line]
    assert shown == [words(line) for line in block("text").splitlines()]


def test_rows_without_a_response_are_judged_by_their_answers(folder):
    (folder / "gold.jsonl").write_text('{"question": "2", "answer": "2"}\n{"question": "3", "answer": "3"}\n')
    done = penstock(folder, "reward", "try", "rewards.py:score", "--data", "gold.jsonl")
    assert done.returncode == 0, done.stderr
    assert [line.split()[4] for line in done.stdout.splitlines() if "answer " in line] == [
        "correct",
        "wrong",
        "correct",
    ]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def score(*_): return 2", "it returned 2 (int), expected a bool"),
        ("def score(*_): return None", "it returned None (NoneType), expected a bool"),
        ("def score(*_): return float('nan')", "it returned nan (float)"),
        ("def score(*_): return 'yes'", "it returned 'yes' (str)"),
        ("def score(*_):\n    return {}['x']", "raised KeyError: 'x' (rewards.py, line 2)"),
        ("def score(*_):\n    import absent_package", "No module named 'absent_package' (rewards.py, line 2)"),
    ],
)
def test_a_reward_without_a_verdict_says_why(folder, source, reason):
    (folder / "rewards.py").write_text(source)
    done = penstock(folder, "reward", "try", "rewards.py:score", "--data", "train.jsonl")
    assert done.returncode == 1
    assert reason in done.stdout
    assert "3 responses: 0 correct, 0 wrong, 3 unknown" in done.stdout


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import absent_package\ndef score(*_): return 1", "No module named 'absent_package' (rewards.py, line 1)"),
        ("def score(*_) return 1", "rewards.py"),
        ("def other(*_): return 1", "it has 'other'"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(folder, source, expected):
    (folder / "rewards.py").write_text(source)
    done = penstock(folder, "reward", "try", "rewards.py:score", "--data", "train.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
