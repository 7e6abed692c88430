"""What a replica waits for while it starts has a name."""

import time

import pytest

from tests.conftest import recipe_document, service_context
from verifier.sandbox import Sandbox
from verifier.service import VerifierService


async def test_the_start_of_the_judging_process_is_a_wait(redis, run_id, monkeypatch):
    document = recipe_document("/nowhere", limits={"startup_timeout_s": 77.0})
    seen = []

    async with service_context(redis, run_id, document, "verifier") as context:

        async def start(*_):
            seen.extend((wait.name, wait.deadline_s) for wait in context.waits.current(time.time() + 5))
            raise TimeoutError("far enough")

        monkeypatch.setattr(Sandbox, "start", start)
        with pytest.raises(TimeoutError, match="far enough"):
            await VerifierService().run(context)
        assert context.waits.current(time.time() + 5) == ()
    assert seen == [("sandbox", 77.0)]


async def test_what_the_confinement_lacks_is_an_event(redis, run_id, monkeypatch):
    async with service_context(redis, run_id, recipe_document("/nowhere"), "verifier") as context:

        async def start(*_):
            context.stopping.set()
            return ("this platform has no seccomp",)

        monkeypatch.setattr(Sandbox, "start", start)
        await VerifierService().run(context)
        events = [(event.phase, event.text) for _, event in await context.journal.events()]
    assert ("unconfined", "this platform has no seccomp") in events
