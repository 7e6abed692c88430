"""The isolation of this machine: bubblewrap from PATH or from `make tools`."""

import pytest

from tests.harness.programs import needed
from verifier.programs.isolation import BWRAP_VARIABLE, IsolationError, find_isolation
from verifier.programs.limits import ProgramLimits
from verifier.programs.verdict import judge


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
