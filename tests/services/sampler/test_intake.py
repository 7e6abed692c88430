"""The intake of verdicts: what a judged group says about its prompt, and at which step."""

from services.contracts import CommittedPolicy, Outcome
from services.sampler.data import load_splits
from services.sampler.queue.intake import VerdictIntake
from services.sampler.queue.state import QueueState
from services.sampler.selection.posterior import PassRates
from services.streams.keys import RunKeys
from services.streams.state.group_state import GroupTransitions
from tests.harness.small_run import recipe_document, service_context
from tests.services.sampler.judged import group_of

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


async def test_a_pass_rate_is_of_the_step_of_the_oldest_response(redis, run_id):
    async with service_context(redis, run_id, recipe_document("/none"), "sampler") as context:
        transitions = await GroupTransitions.fenced(redis, RunKeys(run_id), "sampler")
        state = await QueueState.load(context, transitions, load_splits(context.record.recipe.data).train)
        intake = VerdictIntake(state)
        await intake.open()
        policy = CommittedPolicy(version=7, step=3, version_steps='{"5": 1, "6": 2, "7": 3}')
        await intake.read(policy)
        group = group_of((C, 4, False, 6), (W, 4, False, 5), (U, 4, False, 7), (C, 4, False, 7))
        prompt, stored = intake._update_pass_rate(group, "kept")
    expected = PassRates(context.record.recipe.algorithm.dynamic_sampling.selection.half_life)
    expected.observe("p", 2, 3, 1)
    assert (prompt, stored) == ("p", expected.entry("p"))
