"""Owns a pytest plugin: it writes one JSON line per conformance test, for the table of `penstock conformance`.

Must not affect the tests. Load it with `-p tests.conformance.rows --rows FILE`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RANKING = ("passed", "skipped", "failed")
"""The status of a test is the last of these among its phases (set-up, call, tear-down)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=Path, required=True, help="File to which one JSON line per test is appended.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Rows(config.getoption("--rows")))


class _Rows:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._marks: dict[str, dict[str, Any]] = {}
        self._worst: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = item.get_closest_marker("conformance")
            if mark is not None:
                self._marks[item.nodeid] = mark.kwargs

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worst = self._worst.get(report.nodeid, "passed")
        self._worst[report.nodeid] = max(worst, report.outcome, key=RANKING.index)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid in self._marks:
            row = {**self._marks[nodeid], "test": nodeid, "status": self._worst.get(nodeid, "failed")}
            with self._path.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
