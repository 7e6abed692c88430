"""Processes that are forked with their libraries loaded. The server is in a program of its own, and ends with it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
from rollout.processes.environment import AHEAD
from rollout.processes.forking import ForkedContext, load_ahead

MODULES = {modules}

def look(answers):
    loaded = [name for name in MODULES if name in sys.modules]
    status = open(f"/proc/{{os.getppid()}}/status").read()
    threads = int(status.split("Threads:")[1].split()[0])
    answers.put((loaded == list(MODULES), os.environ.get("EARLY"), os.environ.get("LATE"), threads))

if __name__ == "__main__":
    os.environ["EARLY"] = "1"
    load_ahead(MODULES)
    os.environ["LATE"] = "2"
    del os.environ["EARLY"]
    context = ForkedContext()
    answers = context.SimpleQueue()
    process = context.Process(target=look, args=(answers,))
    process.start()
    print(answers.get())
    process.join(60)
    print(process.exitcode, "vllm" in sys.modules)
"""


def forked(tmp_path: Path, modules: str) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(modules=modules))
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_forked_process_has_its_libraries_and_variables(tmp_path: Path) -> None:
    """It has the variables of its start, and not those of the server."""
    assert forked(tmp_path, '("wave",)') == ["(True, None, '2', 1)", "0 False"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_server_of_engines_has_one_thread(tmp_path: Path) -> None:
    """Other threads' locks would never be released in what is forked from it."""
    assert forked(tmp_path, "AHEAD") == ["(True, None, '2', 1)", "0 False"]
