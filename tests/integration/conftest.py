"""Owns the stack that the integration tests share, and the finished run that several tests inspect.

Must not check the run.
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
    """One stack for all tests of a session; if a test has stopped it, the next test gets a new one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack: Stack | None = None
        self._started = 0

    def get(self) -> Stack:
        """The running stack; started if there is none."""
        if self._stack is None or self._stack.process.poll() is not None:
            self._started += 1
            folder = self._folder / f"runs-{self._started}"
            self._stack = Stack(folder, os.environ.get("PENSTOCK_TEST_REDIS")).__enter__()
        return self._stack

    def stop(self) -> None:
        """Stop the stack, if it runs. Fails if processes are left."""
        if self._stack is not None:
            self._stack.stop()
            assert self._stack.left == [], self._stack.output


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStack]:
    """The owner of the shared stack."""
    holder = SharedStack(tmp_path_factory.mktemp("stack"))
    yield holder
    holder.stop()


@pytest.fixture
def stack(shared_stack: SharedStack) -> Stack:
    """A running stack, shared with other tests."""
    return shared_stack.get()


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of prompts."""
    return write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl")


@pytest.fixture(scope="session")
def finished_run(shared_stack: SharedStack, tiny_model: Path, questions: Path) -> FinishedRun:
    """A finished on-policy run that lost a replica. Tests may read it, but not change it."""
    return finish_run(shared_stack.get(), tiny_model, questions)
