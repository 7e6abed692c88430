"""The isolation of this machine: bubblewrap from PATH or from `make tools`."""

from pathlib import Path

import pytest

from tests.harness.programs import needed
from verifier.programs.isolation import BWRAP_VARIABLE, IsolationError, find_isolation
from verifier.programs.limits import ProgramLimits
from verifier.programs.verdict import judge


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group of pytest-xdist: these tests look for what programs leave on the machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("programs"))


@pytest.fixture(scope="session")
def isolation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BWRAP_VARIABLE, str(needed("bwrap")))
        find_isolation.cache_clear()
        try:
            yield find_isolation()
        except IsolationError as error:
            pytest.skip(str(error))
        find_isolation.cache_clear()


@pytest.fixture
def judged(isolation):
    """Judge a program's text, with limits by name."""

    async def run(program, reference, options=None, **limits):
        return await judge(
            f"Here it is.\n```python\n{program}\n```\n", reference, options or {}, ProgramLimits(**limits)
        )

    return run
