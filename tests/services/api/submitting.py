"""Owns a submitted run for the tests of the gateway.

Must not be used outside tests.
"""

from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document


async def submitted(api, redis, run, *states, **sections):
    """A run that went through `states`; `sections` are merged into its recipe."""
    await api.post("/v1/runs", json={"id": run, "recipe": recipe_document("/model", **sections)})
    for state in states:
        await RunRecords(redis).transition(run, state, "test")
    return f"/v1/runs/{run}"
