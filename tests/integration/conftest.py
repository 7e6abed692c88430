"""Owns the stack that the integration tests share, and the finished run that several of them look at.

Must not decide what a test expects of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.stack import Stack
from tests.harness.workload import write_questions
from tests.integration.runs import FinishedRun, finish_run


class SharedStack:
    """One stack for all tests of a session; where a test has ended it, the next one gets another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack: Stack | None = None
        self._started = 0

    def get(self) -> Stack:
        """The stack, ready to take runs."""
        if self._stack is None or self._stack.process.poll() is not None:
            self._started += 1
            folder = self._folder / f"runs-{self._started}"
            self._stack = Stack(folder, os.environ.get("PENSTOCK_TEST_REDIS")).__enter__()
        return self._stack

    def stop(self) -> None:
        """End it, if it runs. Raises AssertionError naming what it left behind."""
        if self._stack is not None:
            self._stack.stop()
            assert self._stack.left == [], self._stack.output


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStack]:
    """The holder of the shared stack."""
    one = SharedStack(tmp_path_factory.mktemp("stack"))
    yield one
    one.stop()


@pytest.fixture
def stack(shared_stack: SharedStack) -> Stack:
    """A real stack that takes runs; other tests use it too."""
    return shared_stack.get()


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of prompts."""
    return write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl")


@pytest.fixture(scope="session")
def finished_run(shared_stack: SharedStack, tiny_model: Path, questions: Path) -> FinishedRun:
    """An on-policy run that lost a replica, as it stands at its end; every test may read it, none may change it."""
    return finish_run(shared_stack.get(), tiny_model, questions)
