"""Owns the fixtures of the tests on GPUs, and the last line of their report, which says whether anything ran.

Must not import what a machine with a GPU, torch and DeepSpeed alone lacks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from learner.training.process_group import Ranks
from learner.training.trainer import leave
from tests.gpu.needs import Machine, rehearsing
from tests.harness.tiny_model import write_tiny_model

# torch.use_deterministic_algorithms needs it before the first call of cuBLAS.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Counted:
    """The tests that ran, and those that did not for lack of what they need."""

    ran = 0
    skipped = 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test when it has been called, or skipped before that."""
    Counted.ran += report.when == "call" and not report.skipped
    Counted.skipped += report.skipped


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the last line, if tests on GPUs were selected, by themselves (this folder is then pytest's root)."""
    if config.rootpath != Path(__file__).parent or config.option.collectonly or not (Counted.ran + Counted.skipped):
        return
    print(last_line(Counted.ran, Counted.skipped, rehearsal=rehearsing()))


def last_line(ran: int, skipped: int, *, rehearsal: bool) -> str:
    """What the report ends with."""
    if rehearsal:
        return f"tests on GPUs: REHEARSED on the CPU: {ran} ran, {skipped} did not; this shows nothing about GPUs"
    if not ran:
        why = Machine.found().why
        return f"tests on GPUs: NOTHING RAN: all {skipped} need what this machine lacks{f': {why}' if why else ''}"
    return f"tests on GPUs: {ran} ran, {skipped} did not, for lack of what their reasons name"


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama of 0.3 M parameters in bfloat16, so that loading it rounds nothing."""
    return write_tiny_model(tmp_path_factory.mktemp("policy"), scale=0.1, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def large_logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with larger weights: logits of up to 8, as those of trained models."""
    return write_tiny_model(tmp_path_factory.mktemp("large-logits"), scale=0.2, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """This process as the only rank."""
    group = Ranks(0, 1, "127.0.0.1", 0, timeout_s=120)
    yield group
    leave(group)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Give a device's memory back after each test: a failed one leaves its trainer open."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
