"""Owns the rule that every conformance test, here or elsewhere, says which formula and which setting it checks.

Must not select or skip tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a conformance test that the table could not name, before any is deselected."""
    for item in items:
        mark = item.get_closest_marker("conformance")
        if mark is None and HERE not in item.path.parents:
            continue
        if mark is None or set(mark.kwargs) != {"formula", "setting"} or mark.args:
            raise pytest.UsageError(f"{item.nodeid}: needs @pytest.mark.conformance(formula=..., setting=...)")
