"""The ledger closes to the token after every move of a group, and a project keeps what its runs used."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts import Closing, EvaluationRecord, Lane, Release, RunState
from services.settings import Prices, parse_recipe
from services.streams.keys import RunKeys, project_ledger
from services.streams.runs.budget import budget_faults, spent_budget
from services.streams.runs.ledger import (
    BUSY,
    COST,
    CPU_MS,
    ENDED_USES,
    GPU_MS,
    IDLE,
    TOKEN_USES,
    Ledger,
    LedgerWriter,
    charged_field,
    close_ledger,
    read_ledger,
    read_project_ledger,
)
from services.streams.runs.uses import USES, ledger_document, rows_of
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import close_run
from services.streams.state.events import EventLog
from services.streams.state.ownership import become_owner
from services.streams.state.rewind import ReopenedGroup, Rewind
from services.streams.state.runs import OWNER, RunRecords
from tests.harness.small_run import recipe_document
from tests.services.driven import BODY, STATE, DrivenRun, contents, sample_of, task_of

RECIPE = parse_recipe(recipe_document("/model"))
USD = Prices(currency="USD", gpu_hour=2.5, cpu_hour=0.04)


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


@pytest.fixture
async def run(redis, keys):
    return await DrivenRun.open(redis, keys)


async def tokens(run):
    """The tokens of a run that are not zero; they must close."""
    ledger = await read_ledger(run.redis, run.keys)
    assert ledger.closes, ledger
    return {use: number for use, number in ledger.tokens.items() if number}


async def test_each_end_of_a_group_is_a_use_of_its_tokens(run):
    await run.published("g0")
    assert await tokens(run) == {"generated": 4, "in_flight": 4}
    await run.sampler.release(Lane.TRAIN, "g0", Release.DEAD, 2)
    await run.trained(1, "g1")
    for group, release in (("g2", Release.FILTERED), ("g3", "kept"), ("g4", "kept")):
        await run.decided(group, release)
    await run.sampler.release(Lane.TRAIN, "g3", Release.STALE, 2)
    uses = dict.fromkeys(("trained", "filtered", "stale", "dead", "in_flight"), 4)
    assert await tokens(run) == {"generated": 20, **uses}


async def test_only_the_first_sample_of_an_index_counts(run, keys):
    delivery = await run.dispatched("g0", 3)
    for expected in (True, False):
        assert await run.publish(delivery.lease, sample_of(keys, "g0", 0), 3) is expected
    assert await tokens(run) == {"generated": 2, "in_flight": 2}


async def test_samples_of_one_call_count_their_own_tokens(run, keys):
    delivery = await run.dispatched("g0")
    samples = []
    for index, number in enumerate((3, 5)):
        sample = sample_of(keys, "g0", index)
        facts = sample.facts.model_copy(update={"response_tokens": number})
        samples.append((sample.model_copy(update={"facts": facts}), BODY))
    await run.transitions.publish_samples(Lane.TRAIN, delivery.lease, 2, samples)
    assert await tokens(run) == {"generated": 8, "in_flight": 8}


async def test_a_group_without_a_hash_keeps_its_tokens(run, redis, keys):
    """A failover may lose the hash of a pending group alone."""
    await run.published("g0")
    await redis.unlink(keys.group("g0"))
    assert await tokens(run) == {"generated": 4, "in_flight": 4}
    for _ in range(2):
        await run.sampler.release(Lane.TRAIN, "g0", Release.DEAD, 2)
        assert await tokens(run) == {"generated": 4, "dead": 4}


async def test_a_withdrawn_group_is_discarded_once(run, keys):
    await run.published("g0")
    for _ in range(2):
        await run.sampler.withdraw(Lane.TRAIN, "g0", 2)
        assert await tokens(run) == {"generated": 4, "discarded": 4}
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
    [delivery] = await run.rollout().read(1, 1)
    assert await run.publish(delivery.lease, sample_of(keys, "g0", 1))
    assert await tokens(run) == {"generated": 6, "discarded": 4, "in_flight": 2}


async def test_a_rewound_step_is_discarded_once_with_its_last_groups(run, redis, keys):
    await run.trained(1, "g0")
    await run.trained(2, "g1", "g2")
    await run.decided("g3", "kept")
    [*_, (entry, _)] = await EventLog(redis, keys, "test").steps()
    rewind = Rewind(redis, keys, "sampler", run.sampler.fence, 1)
    assert await rewind.start()
    await rewind.reopen([ReopenedGroup("g3", "p0", 2)])
    assert await tokens(run) == {"generated": 16, "trained": 12, "discarded": 4}
    await rewind.reopen([ReopenedGroup("g1", "p0", 2)])
    for _ in range(2):
        await rewind.reopen([ReopenedGroup(group, "p0", 2) for group in ("g1", "g2")], 2, entry)
        assert await tokens(run) == {"generated": 16, "trained": 4, "discarded": 12}


async def test_a_step_of_a_release_without_ledgers_is_rewound(run, redis, keys):
    await run.trained(1, "g0")
    await redis.unlink(keys.step_tokens)
    await redis.hdel(run.streams.counters, "tokens_trained", "tokens_generated")
    [(entry, _)] = await EventLog(redis, keys, "test").steps()
    rewind = Rewind(redis, keys, "sampler", run.sampler.fence, 1)
    await rewind.start()
    await rewind.reopen([ReopenedGroup("g0", "p0", 2)], 1, entry)
    assert await tokens(run) == {}


async def test_evaluations_that_leave_are_discarded(run, redis, keys):
    lane = keys.lane(Lane.EVALUATION)
    await redis.hset(lane.counters, mapping={"tokens_generated": 90, "tokens_evaluated": 70, "dispatched": 9})
    await redis.hset(lane.tokens_in_flight, mapping={"e.x": 15, "e.y": 5})
    assert await tokens(run) == {"generated": 90, "evaluated": 70, "in_flight": 20}
    fields = {"version": 0, "prompts": 1, "samples_per_prompt": 1, "accuracy": 0.5, "standard_error": 0.1, "unknown": 0}
    [entry] = await run.append(keys.evaluations, EvaluationRecord(name="after", **fields, response_tokens=30))
    rewind = Rewind(redis, keys, "sampler", run.sampler.fence, 1)
    for _ in range(2):
        await rewind.delete_evaluations([entry], 40)
        assert await tokens(run) == {"generated": 90, "evaluated": 40, "discarded": 50}
    assert await run.counts(Lane.EVALUATION) == {}


async def writer_of(redis, keys, project):
    return LedgerWriter(redis, keys, await become_owner(redis, keys, OWNER), project)


async def test_a_project_has_the_sums_of_its_runs(redis, run_id):
    project, amounts = f"{run_id}-p", {charged_field("rollout", BUSY, GPU_MS): 2000}
    runs = [await DrivenRun.open(redis, RunKeys(f"{run_id}-{name}")) for name in "ab"]
    writers = [await writer_of(redis, run.keys, project) for run in runs]
    for run, writer in zip(runs, writers, strict=True):
        await run.decided("g0", Release.FILTERED)
        await run.published("g1")
        for _ in range(2):
            await writer.charge(1.5, amounts)
    await runs[0].sampler.release(Lane.TRAIN, "g1", Release.STALE, 2)
    await writers[0].charge(2.5, amounts)
    ledger = await read_project_ledger(redis, project)
    assert ledger.closes
    assert {use: n for use, n in ledger.tokens.items() if n} == {
        "generated": 16,
        "filtered": 8,
        "stale": 4,
        "in_flight": 4,
    }
    assert ledger.total(GPU_MS) == 6000
    own = await read_ledger(redis, runs[0].keys)
    assert (own.total(GPU_MS), own.since, own.at) == (4000, 1.5, 2.5)


async def test_a_run_that_succeeded_has_nothing_in_flight(run, redis, keys):
    await run.published("g0")
    writer = await writer_of(redis, keys, f"{keys.run}-p")
    await writer.charge(1.5, {}, discard=True)
    assert await tokens(run) == {"generated": 4, "discarded": 4}


@pytest.mark.parametrize("closing", [Closing.EXPIRING, Closing.ARCHIVING, Closing.DELETING])
async def test_a_project_outlives_its_runs(redis, run_id, keys, closing):
    """Also if the closing is cut off and repeated, or an expired run is deleted later."""
    records, project = RunRecords(redis), f"{run_id}-p"
    await records.create(run_id, RECIPE, project=project)
    await records.transition(run_id, RunState.FAILED, "test")
    run = await DrivenRun.open(redis, keys, new=False)
    await run.decided("g0", Release.FILTERED)
    await run.published("g1")
    evaluated = {"tokens_generated": 2, "tokens_evaluated": 2}
    await redis.hset(keys.lane(Lane.EVALUATION).counters, mapping=evaluated)
    await (await writer_of(redis, keys, project)).charge(1.5, {charged_field("learner", IDLE, CPU_MS): 7})
    used = {"generated": 10, "filtered": 4, "discarded": 4, "evaluated": 2}
    record = await close_run(redis, run_id, closing)
    for _ in range(2):
        await close_ledger(redis, record, closing)
        if closing is Closing.DELETING:
            await redis.unlink(run.streams.counters)  # as much as was deleted when it was cut off
            await close_ledger(redis, record, closing)
        assert await erase(redis, keys, closing)
    if closing is not Closing.DELETING:
        assert await tokens(run) == used
    await close_ledger(redis, await close_run(redis, run_id, Closing.DELETING), Closing.DELETING)
    ledger = await read_project_ledger(redis, project)
    assert {use: n for use, n in ledger.tokens.items() if n} == used
    assert ledger.total(CPU_MS) == 7


async def test_a_run_that_is_not_closed_keeps_its_ledger(redis, run_id, keys):
    records = RunRecords(redis)
    await records.create(run_id, RECIPE)
    run = await DrivenRun.open(redis, keys, new=False)
    await run.published("g0")
    await (await writer_of(redis, keys, f"{run_id}-p")).charge(1.5, {})
    before = await contents(redis, keys)
    await close_ledger(redis, await records.get(run_id), Closing.DELETING)
    assert await contents(redis, keys) == before


async def test_a_run_of_a_release_without_ledgers_has_an_empty_one(redis, run_id, keys):
    await redis.hset(keys.lane(Lane.TRAIN).counters, mapping={"dispatched": 8, "trained": 8, "response_tokens": 99})
    ledger = await read_ledger(redis, keys)
    assert (ledger.closes, ledger.since, set(ledger.tokens.values())) == (True, None, {0})
    assert ledger_document(ledger)["cost"] is None
    assert (await read_project_ledger(redis, f"{run_id}-none")).closes
    assert not await redis.exists(project_ledger(f"{run_id}-none"))


def ledgers():
    counts = st.fixed_dictionaries(dict.fromkeys(TOKEN_USES, st.integers(0, 10**12)))
    fields = [
        charged_field(service, condition, *what)
        for service in ("rollout", "verifier", "learner")
        for condition in (BUSY, IDLE)
        for what in ((GPU_MS,), (CPU_MS,), (COST, "USD"), (COST, "EUR"))
    ]
    charged = st.dictionaries(st.sampled_from(fields), st.integers(0, 10**15))
    return st.builds(lambda uses, amounts: Ledger({**uses, "generated": sum(uses.values())}, amounts), counts, charged)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(ledgers())
def test_rows_sum_exactly_to_the_totals(ledger):
    rows = rows_of(ledger, "USD")
    assert [row.use for row in rows] == list(USES)
    assert sum(row.tokens for row in rows) == ledger.tokens["generated"]
    assert sum(row.gpu_ms for row in rows) == ledger.total(GPU_MS)
    assert sum(row.cpu_ms for row in rows) == ledger.total(CPU_MS)
    assert sum(row.cost for row in rows) == ledger.total(COST, "USD")
    assert min(row.gpu_ms for row in rows) >= 0
    assert sum(row.share for row in rows) == pytest.approx(1 if ledger.total(GPU_MS) or ledger.total(CPU_MS) else 0)


def test_seconds_follow_the_tokens():
    uses = dict.fromkeys(TOKEN_USES, 0) | {"trained": 300, "filtered": 100}
    amounts = {
        charged_field("rollout", BUSY, GPU_MS): 4000,
        charged_field("rollout", IDLE, GPU_MS): 500,
        charged_field("learner", BUSY, GPU_MS): 1000,
        charged_field("learner", IDLE, GPU_MS): 250,
    }
    found = {row.use: row.gpu_ms for row in rows_of(Ledger({**uses, "generated": 400}, amounts), None) if row.gpu_ms}
    assert found == {"trained": 4000, "filtered": 1000, "idle": 750}
    nothing = Ledger(dict.fromkeys(("generated", *TOKEN_USES), 0), amounts)
    found = {row.use: row.gpu_ms for row in rows_of(nothing, None) if row.gpu_ms}
    assert found == {"trained": 1000, "in_flight": 4000, "idle": 750}, "no token was generated yet"


def test_a_ledger_that_lost_tokens_does_not_close():
    uses = dict.fromkeys(TOKEN_USES, 0)
    assert not Ledger({**uses, "generated": 1}, {}).closes
    assert not Ledger({**uses, "trained": -1, "filtered": 1, "generated": 0}, {}).closes
    assert {"in_flight", *ENDED_USES} == set(TOKEN_USES)


def test_a_budget_is_spent_with_both_numbers():
    charged = {
        charged_field("rollout", IDLE, COST, "USD"): 25_030_000_000,
        charged_field("rollout", IDLE, GPU_MS): 3600,
    }
    ledger = Ledger(dict.fromkeys(("generated", *TOKEN_USES), 0), charged)

    def spent(prices=USD, **budgets):
        return spent_budget(RECIPE.limits.model_copy(update=budgets), ledger, prices)

    assert spent() is None
    assert spent(budget=25.0) == "limits.budget: 25.00 USD is spent (25.03)"
    assert spent(budget=25.04) is None
    assert spent(budget=25.0, prices=Prices(currency="EUR")) is None, "another currency"
    assert spent(gpu_hours=0.001) == "limits.gpu_hours: 0.001 GPU hours are spent (0.001)"
    [fault] = budget_faults(RECIPE.limits.model_copy(update={"budget": 25.0}), None)
    assert fault.startswith("limits.budget: 25.0 is not valid: expected null, because this platform states no prices")
    assert budget_faults(RECIPE.limits.model_copy(update={"budget": 25.0}), USD) == []
