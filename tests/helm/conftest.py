"""Owns which tests of the chart run in one process: those that share renderings, so that each is rendered once.

Must not choose what is tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ALONE = {
    "test_api_starts",
    "test_bad_input",
    "test_cluster_checks",
    "test_guide",
    "test_network_evaluator",
    "test_null",
    "test_values",
}
"""Files that render their own values, or nothing: any process may run them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that render into one group of pytest-xdist, before tests/conftest.py groups the others by file."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem not in ALONE:
            item.add_marker(pytest.mark.xdist_group("helm"))
