"""What is kept of half-drawn responses: who may keep it, what a repeated or late call does, and when it leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollout.half_drawn import KEEP_TOKENS
from services.contracts import Lane, Release, VersionSpan
from services.settings import parse_recipe
from services.streams.delivery.drawn import DrawnTokens, joined_tokens, tokens_from
from services.streams.delivery.leases import return_lease
from services.streams.delivery.nucleus import Nuclei
from services.streams.delivery.partials import (
    NEVER,
    Partial,
    Piece,
    keep_partials,
    packed_piece,
    read_partials,
    unpacked_piece,
)
from services.streams.keys import RunKeys
from services.streams.memory_bound import SLACK, _Group
from services.streams.state.rewind import ReopenedGroup, Rewind
from services.streams.state.stats import stream_figures
from tests.harness.each import each
from tests.harness.small_run import recipe_document
from tests.services.driven import STATE, DrivenRun, sample_of, task_of

PROMPT = np.array([2, 4, 9], np.int32)
G, LEASE_S = 3, 30.0


def drawn(first: int, count: int, version: int = 1, top_k: bool = False) -> DrawnTokens:
    ids = np.arange(first, first + count, dtype=np.int32)
    nuclei = Nuclei(
        np.repeat(ids, 2) + np.tile([0, 500], count).astype(np.int32), np.arange(count + 1, dtype=np.int32) * 2
    )
    spans = (VersionSpan(version=version, start=0, end=count),) if count else ()
    return DrawnTokens(ids, -ids.astype(np.float32) / 64, spans, nuclei if top_k else None)


def piece(start: int, end: int, attempt: str = "a", base: int = 0, index: int = 0, version: int = 1) -> Piece:
    return Piece(index, attempt, base, start, Partial(drawn(10 + start, end - start, version), 7.5))


def arrays(tokens: DrawnTokens) -> list[list[float]]:
    nuclei = tokens.nuclei
    found = [tokens.response_ids, tokens.behaviour_logprobs, *((nuclei.ids, nuclei.offsets) if nuclei else ())]
    return [array.tolist() for array in found]


def same(one: DrawnTokens, other: DrawnTokens) -> bool:
    return arrays(one) == arrays(other) and one.spans == other.spans


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


@pytest.fixture
async def run(redis, keys):
    return await DrivenRun.open(redis, keys, LEASE_S)


async def keep(run, lease, *pieces):
    return await keep_partials(run.redis, run.keys, lease, "g0", pieces, PROMPT, 2)


async def kept(run, entry):
    whole, damaged = await read_partials(run.redis, run.keys, "g0", entry, PROMPT)
    assert damaged == {}
    return {index: len(partial.tokens) for index, partial in whole.items()}


@each("cut, top_k", [(cut, top_k) for cut in (1, 2, 5, 6) for top_k in (False, True)], str)
def test_parts_of_a_response_make_the_whole(cut, top_k):
    """Through the stored form; spans of one version that adjoin become one."""
    whole = joined_tokens([drawn(10, 3, 1, top_k), drawn(13, 4, 2, top_k)])
    head = replace(
        whole,
        response_ids=whole.response_ids[:cut],
        behaviour_logprobs=whole.behaviour_logprobs[:cut],
        spans=tuple(
            VersionSpan(version=span.version, start=span.start, end=min(span.end, cut))
            for span in whole.spans
            if span.start < cut
        ),
        nuclei=whole.nuclei and Nuclei(whole.nuclei.ids[: 2 * cut], whole.nuclei.offsets[: cut + 1]),
    )
    parts = [head, tokens_from(whole, cut)]
    stored = [unpacked_piece(packed_piece(Partial(part, 3.25), PROMPT), PROMPT) for part in parts]
    assert [partial.started_at for partial in stored] == [3.25, 3.25]
    assert same(joined_tokens([partial.tokens for partial in stored]), whole)


def test_a_response_with_some_nuclei_is_not_joined():
    with pytest.raises(ValueError, match="only some of these tokens have one"):
        joined_tokens([drawn(10, 3), drawn(13, 4, top_k=True)])


@each("at", range(0, 60, 7))
def test_a_changed_piece_is_not_read(at):
    stored = packed_piece(Partial(drawn(10, 5), 3.25), PROMPT)
    changed = stored[:at] + bytes([stored[at] ^ 4]) + stored[at + 1 :]
    for body, prompt in ((changed, PROMPT), (stored[:at], PROMPT), (stored, PROMPT + 1)):
        with pytest.raises(ValueError, match="checksum"):
            unpacked_piece(body, prompt)


@each(
    "fault",
    [
        replace(drawn(10, 3), behaviour_logprobs=np.array([0, -np.inf, 0], np.float32)),
        replace(drawn(10, 3), spans=(VersionSpan(version=1, start=0, end=2),)),
        replace(drawn(10, 3), spans=()),
        replace(drawn(10, 3, top_k=True), nuclei=Nuclei(np.array([1, 2, 3], np.int32), np.arange(4, dtype=np.int32))),
    ],
    lambda fault: str(fault.spans),
)
def test_a_whole_piece_with_wrong_content_is_not_read(fault):
    stored = packed_piece(Partial(fault, 3.25), PROMPT)
    with pytest.raises(ValueError, match="valid: expected"):
        unpacked_piece(stored, PROMPT)


async def test_pieces_are_kept_in_order_and_once(run):
    delivery = await run.dispatched("g0", G)
    lease = delivery.lease
    assert await keep(run, lease, piece(0, 16), piece(0, 5, index=2)) == [16, 5]
    assert await keep(run, lease, piece(16, 40)) == [40]
    assert await keep(run, lease, piece(16, 40)) == [40]  # its reply was lost
    assert await keep(run, lease, piece(50, 60)) == [40], "a gap"
    assert await keep(run, lease, piece(0, 16, index=G)) == [NEVER], "no sample of the group"
    whole, damaged = await read_partials(run.redis, run.keys, "g0", lease.entry, PROMPT)
    assert damaged == {}
    assert same(whole[0].tokens, joined_tokens([drawn(10, 40)]))
    assert (whole[0].started_at, len(whole[2].tokens)) == (7.5, 5)


async def test_attempts_do_not_mix(run):
    lease = (await run.dispatched("g0", G)).lease
    assert await keep(run, lease, piece(0, 16), piece(0, 30, index=1)) == [16, 30]
    assert await keep(run, lease, piece(16, 40)) == [40]
    # Another attempt goes on from the first 16, and yet another one from none: what it does not continue leaves.
    assert await keep(run, lease, piece(16, 20, "b", base=16, version=2)) == [20]
    assert await keep(run, lease, piece(40, 44)) == [0], "the first attempt is over"
    whole, _ = await read_partials(run.redis, run.keys, "g0", lease.entry, PROMPT)
    assert [(span.version, span.start, span.end) for span in whole[0].tokens.spans] == [(1, 0, 16), (2, 16, 20)]
    assert await keep(run, lease, piece(0, 20, "c", version=3)) == [20]
    whole, _ = await read_partials(run.redis, run.keys, "g0", lease.entry, PROMPT)
    assert {span.version for span in whole[0].tokens.spans} == {3}
    fields = {name.decode() for name in await run.redis.hkeys(run.keys.partials("g0"))}
    assert {name for name in fields if name.startswith("0:")} == {"0:0"}, "what is over leaves"
    assert len(whole[1].tokens) == 30
    # Redis lost what an attempt began with.
    await run.redis.unlink(run.keys.partials("g0"))
    assert await keep(run, lease, piece(20, 24, "d", base=20)) == [0]
    assert await keep(run, lease, piece(0, 24, "d", base=20)) == [24]
    # That is one piece: another attempt that began with the same 20 tokens finds no end of a piece there.
    assert await keep(run, lease, piece(20, 30, "e", base=20)) == [0]
    assert (await kept(run, lease.entry))[0] == 24
    assert await keep(run, lease, piece(0, 30, "e", base=20)) == [30]
    assert (await kept(run, lease.entry))[0] == 30


async def test_only_the_owner_of_the_lease_keeps(run):
    lease = (await run.dispatched("g0", G)).lease
    assert await keep(run, replace(lease, consumer="other"), piece(0, 16)) == [NEVER]
    assert await keep(run, lease, piece(0, 16)) == [16]
    await run.publish(lease, sample_of(run.keys, "g0", 0), G)
    assert await keep(run, lease, piece(16, 20), piece(0, 4, index=1)) == [NEVER, 4], "sample 0 is published"
    assert await kept(run, lease.entry) == {1: 4}
    await run.lapse(lease)
    [again] = await run.rollout("r1").read(1, 1)
    assert await keep(run, lease, piece(4, 8, index=1)) == [NEVER]
    assert await keep(run, again.lease, piece(4, 8, "b", base=4, index=1)) == [8]
    assert await kept(run, "0-1") == {}, "of another task"


async def released(run, lease):
    await run.sampler.release(Lane.TRAIN, "g0", Release.STALE, G)


async def withdrawn(run, lease):
    await run.sampler.withdraw(Lane.TRAIN, "g0", G)


async def rewound(run, lease):
    rewind = Rewind(run.redis, run.keys, "sampler", run.sampler.fence, 1)
    await rewind.start()
    await rewind.reopen([ReopenedGroup("g0", "p0", G)])


async def published(run, lease):
    for index in range(G):
        await run.publish(lease, sample_of(run.keys, "g0", index), G)


async def evaluation_deleted(run, lease):
    rewind = Rewind(run.redis, run.keys, "sampler", run.sampler.fence, 1)
    await run.redis.hset(run.keys.partials("e.1"), "entry", "1-0")
    await rewind.delete_evaluations([], 0)
    assert not await run.redis.exists(run.keys.partials("e.1"))
    await released(run, lease)


@pytest.mark.parametrize(
    "end", [released, withdrawn, rewound, published, evaluation_deleted], ids=lambda end: end.__name__
)
async def test_nothing_is_kept_of_a_group_that_ends(run, redis, keys, end):
    lease = (await run.dispatched("g0", G)).lease
    assert await keep(run, lease, piece(0, 16), piece(0, 16, index=1)) == [16, 16]
    assert 0 < await redis.ttl(keys.partials("g0")) <= 24 * 3600
    await end(run, lease)
    assert not await redis.exists(keys.partials("g0"))
    assert await keep(run, lease, piece(16, 20), piece(0, 16, "b")) == [NEVER, NEVER]
    assert not await redis.exists(keys.partials("g0"))


async def test_a_reopened_group_starts_with_nothing(run, redis, keys):
    """Even if the old task's pieces had stayed."""
    lease = (await run.dispatched("g0", G)).lease
    await keep(run, lease, piece(0, 16))
    stayed = await redis.dump(keys.partials("g0"))
    await withdrawn(run, lease)
    await redis.restore(keys.partials("g0"), 0, stayed)
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g0", G)], STATE)
    [delivery] = await run.rollout("r1").read(1, 1)
    assert await kept(run, delivery.lease.entry) == {}
    assert await keep(run, delivery.lease, piece(0, 4, "b", index=1)) == [4]
    assert await kept(run, delivery.lease.entry) == {1: 4}


async def test_what_is_kept_is_smaller_than_the_bound_on_payloads(run, redis, keys):
    """In the smallest pieces, of responses without nuclei, which have the least room."""
    lease, tokens = (await run.dispatched("g0", G)).lease, 512
    for start in range(0, tokens, KEEP_TOKENS):
        pieces = [piece(start, start + KEEP_TOKENS, index=index) for index in range(G)]
        assert await keep(run, lease, *pieces) == [start + KEEP_TOKENS] * G
    document = recipe_document("/none", rollout={"max_new_tokens": tokens}, model={"max_model_len": 4096})
    group = _Group(parse_recipe(document), G, tokens)
    assert await redis.memory_usage(keys.partials("g0")) < SLACK * group.payloads


async def deliveries(run, lease):
    [found] = await run.redis.xpending_range(lease.stream, lease.consumer_group, lease.entry, lease.entry, 1)
    return found["times_delivered"]


async def again(run, lease):
    """The next delivery of a task whose replica died; None once it is dead-lettered."""
    await run.lapse(lease)
    [delivery] = await run.rollout("r1").read(1, 1) or [None]
    return delivery


async def test_deliveries_with_progress_are_forgiven_a_while(run):
    lease = (await run.dispatched("g0", G)).lease
    counted = []
    for at in range(24):
        delivery = await again(run, lease)
        if delivery is None:
            break
        lease = delivery.lease
        await keep(run, lease, piece(at, at + 1, f"{at}", base=at))
        counted.append(await deliveries(run, lease))
    # 2 for each of max_deliveries; then these count again, and the third is too many.
    assert counted == [1] * 4 + [2]
    assert await run.redis.xlen(run.keys.dead) == 1


async def test_what_is_drawn_again_is_no_progress(run):
    """Tokens that were lost, or of another version, are not more than there were. A published sample is progress."""
    lease = (await run.dispatched("g0", G)).lease
    await keep(run, lease, piece(0, 30), piece(0, 30, index=1))
    lease = (await again(run, lease)).lease
    assert await keep(run, lease, piece(0, 59, "b", version=2), piece(0, 1, "b", index=1)) == [59, 1]
    assert await deliveries(run, lease) == 2
    assert await keep(run, lease, piece(59, 60, "b")) == [60]
    assert await deliveries(run, lease) == 1
    lease = (await again(run, lease)).lease
    await run.publish(lease, sample_of(run.keys, "g0", 0), G)
    assert await keep(run, lease, piece(1, 2, "c", base=1, index=1)) == [2]
    assert await deliveries(run, lease) == 1


async def test_a_late_publication_leaves_the_pieces_of_the_next_task(run, redis, keys):
    """Of a group that needs more samples than its first task asked for."""
    first = (await run.dispatched("g0", G)).lease
    await run.publish(first, sample_of(run.keys, "g0", 0), 1)
    await redis.hset(keys.partials("g0"), mapping={"entry": "9-9", "tokens:1": 16})
    await run.publish(first, sample_of(run.keys, "g0", 0), 1)  # its reply was lost
    assert await redis.hget(keys.partials("g0"), "entry") == b"9-9"


async def test_a_repeated_task_leaves_no_pieces_of_what_it_published(run, redis, keys):
    """A client whose write was repeated adds a task twice: two replicas draw the group, and one is faster."""
    first = (await run.dispatched("g0", G)).lease
    [(_, fields)] = await redis.xrange(first.stream, first.entry, first.entry)
    await redis.xadd(first.stream, fields)
    [second] = await run.rollout("r1").read(1, 1)
    assert await keep(run, first, piece(0, 16), piece(0, 16, index=1)) == [16, 16]
    for index in range(G - 1):
        await run.publish(second.lease, sample_of(run.keys, "g0", index), G)
        assert await kept(run, first.entry) == ({1: 16} if index == 0 else {})
    assert await keep(run, first, piece(0, 4, index=G - 1)) == [4]
    await run.publish(second.lease, sample_of(run.keys, "g0", G - 1), G)
    assert await kept(run, first.entry) == {}, "with its last sample too"


async def test_a_returned_lease_is_taken_at_once_by_one(run):
    lease = (await run.dispatched("g0", G)).lease
    assert not await return_lease(run.redis, replace(lease, consumer="other"), LEASE_S)
    assert await return_lease(run.redis, lease, LEASE_S)
    assert not await return_lease(run.redis, lease, LEASE_S)
    found = await stream_figures(run.redis, {run.streams.tasks: "rollout"}, LEASE_S)
    assert (found[run.streams.tasks].pending, found[run.streams.tasks].oldest_idle_s) == (1, 0), "no lease is stuck"
    one, two = run.rollout("r1"), run.rollout("r2")
    taken = [await one.read(1, 0.05), await two.read(1, 0.05)]
    assert [len(found) for found in taken] == [1, 0]
    [delivery] = taken[0]
    assert (delivery.message.group, delivery.deliveries) == ("g0", 1)
    assert await keep(run, lease, piece(0, 16)) == [NEVER]
