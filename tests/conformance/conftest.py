"""Owns the rule that every conformance test, in any folder, names the formula and the setting that it checks.

Must not select or skip tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reject a conformance test without a complete marker, before any test is deselected."""
    for item in items:
        mark = item.get_closest_marker("conformance")
        if mark is None and HERE not in item.path.parents:
            continue
        if mark is None or set(mark.kwargs) != {"formula", "setting"} or mark.args:
            raise pytest.UsageError(f"{item.nodeid}: needs @pytest.mark.conformance(formula=..., setting=...)")
