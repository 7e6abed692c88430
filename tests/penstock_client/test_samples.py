"""Samples, the story of a group and ledgers on the command line: readable at 80 columns, whatever a model wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_client.client import Client
from services.contracts import Lane, OptimizerStepRecord, Outcome, Prompt, VersionSpan
from services.settings import parse_recipe
from services.storage.groups.parts import write_part
from services.storage.groups.story import ArchivedGroup, ArchivedSample, GroupRow, GroupTokens
from services.storage.mirror import NO_MIRROR
from services.streams.keys import RunKeys
from services.streams.state.events import append_message
from services.streams.state.runs import RunRecords
from tests.deploy.command_line import penstock
from tests.harness.small_run import recipe_document
from tests.penstock_client.gateways import LateGateway, running_gateway
from tests.penstock_client.other_servers import answer, other_server
from tests.services.driven import batch_of, record_of

HOSTILE = "\x1b]0;owned\x07[bold red]x[/bold red]\u202e"


@pytest.fixture(scope="module")
def gateway(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LateGateway]:
    """A gateway whose token the client finds."""
    with running_gateway(redis_url, tmp_path_factory.mktemp("state")) as gateway:
        yield gateway


def archived(name: str, at_ms: int, **fields: Any) -> GroupRow:
    """A group with two samples; the first one was written by two policy versions."""
    samples = (
        ArchivedSample(
            index=0,
            outcome=Outcome.CORRECT,
            score=1.0,
            answer="6",
            reward=1.0,
            advantage=0.5,
            response_tokens=3,
            mean_logprob=-0.4,
            replica="rollout-1",
            finish_reason="stop",
            text=f"1 + 5 = 6 {HOSTILE}\nprompt p9",
            spans=(VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3)),
        ),
        ArchivedSample(index=1, outcome=Outcome.UNKNOWN, reason="no answer within 10 s", text="word " * 200),
    )
    prompt = Prompt(
        id="p4", messages=({"role": "user", "content": "1 + 5 ="},), verifier="math", reference={"answer": "6"}
    )
    group = ArchivedGroup(
        group=name, lane=Lane.TRAIN, resumption=0, archived_ms=at_ms, prompt=prompt, samples=samples, **fields
    )
    ids = (np.arange(3, dtype=np.int32), np.arange(1, dtype=np.int32))
    return GroupRow(group, GroupTokens(np.array([7], np.int32), ids, tuple(-ids_ / 2.0 for ids_ in ids)))


async def told(redis: Any, gateway: LateGateway, run: str) -> None:
    """A run with a trained group, which the second optimizer step of step 1 trained, and a filtered one."""
    await RunRecords(redis).create(run, parse_recipe(recipe_document("/model")))
    keys = RunKeys(run)
    record = record_of(batch_of(keys, 1, ["g0", "g1", "g2"]), 5)
    losses = tuple(OptimizerStepRecord(loss=loss, gradient_norm=2.5, applied=True) for loss in (0.25, 0.125))
    await append_message(redis, keys, keys.steps, record.model_copy(update={"optimizer": losses}), 0)
    await redis.set(keys.checkpoints, "[3]")
    trained = {"release": "trained", "reason": "1 of 2 samples is correct", "step": 1, "optimizer_step": 2}
    write_part(gateway.runs / run, NO_MIRROR, [archived("g2", 1, version=5, staleness=1, **trained)])
    write_part(gateway.runs / run, NO_MIRROR, [archived("g9", 2, release="filtered", reason="no learning signal")])


def readable(output: str) -> bool:
    """Whether the output is plain text that fits a terminal of 80 columns."""
    return all(len(line) <= 80 and line.isprintable() for line in output.splitlines())


async def test_the_story_of_a_group_is_told_to_the_end(redis: Any, gateway: LateGateway, run_id: str) -> None:
    await told(redis, gateway, run_id)
    status, output = await asyncio.to_thread(penstock, "lineage", run_id, "g2", "--api", gateway.url)
    assert (status, readable(output)) == (0, True), output
    text = " ".join(output.split())
    for said in (
        "group g2: trained, 1 attempt",
        "prompt p4, verifier math",
        "| 1 + 5 =",
        'reference: {"answer": "6"}',
        "sample 0: correct, score 1, reward +1.000, advantage +0.500",
        "3 tokens, mean log-prob -0.4000, finish stop, by rollout-1",
        "policy versions: 3 wrote tokens 0 to 1, 4 wrote token 2",
        "sample 1: unknown",
        "reason: no answer within 10 s",
        "released: trained: 1 of 2 samples is correct",
        "trained: rollout step 1, optimizer step 2 of it (loss 0.125, gradient norm 2.5)",
        "published as version 5",
        "checkpoint: step-000003",
        "(1,000 characters)",
    ):
        assert said in text, said
    assert "\n    | prompt p9\n" in output, "no line of a response looks like one of the story"
    status, whole = await asyncio.to_thread(penstock, "lineage", run_id, "g2", "--full", "--api", gateway.url)
    assert (status, readable(whole), whole.count("word")) == (0, True, 200)
    status, output = await asyncio.to_thread(penstock, "lineage", run_id, "g2", "--json", "--api", gateway.url)
    assert (status, json.loads(output)["attempts"][0]["optimizer_step"]) == (0, 2)
    status, output = await asyncio.to_thread(penstock, "lineage", run_id, "g/../7", "--api", gateway.url)
    assert (status, output.count("\n"), "Traceback" in output) == (2, 1, False), output


async def test_samples_are_searched_and_limited(redis: Any, gateway: LateGateway, run_id: str) -> None:
    await told(redis, gateway, run_id)

    async def listed(*given: str) -> tuple[str, list[str]]:
        status, output = await asyncio.to_thread(penstock, "samples", run_id, *given, "--api", gateway.url)
        assert status == 0, output
        heading, *rows = output.splitlines() or [""]
        return heading, rows

    heading, rows = await listed()
    expected = ["group", "#", "verdict", "score", "advantage", "fate", "step", "tokens", "response"]
    assert heading.split() == expected
    assert [row.split()[:2] for row in rows] == [["g9", "0"], ["g9", "1"], ["g2", "0"], ["g2", "1"]]
    assert all(row.isprintable() for row in rows)
    for given, found in (
        (["--step", "1", "--outcome", "correct"], ["g2"]),
        (["--release", "filtered", "--search", "WORD"], ["g9"]),
        (["--version", "4", "--min", "0.5", "--prompt", "p4", "--lane", "train"], ["g9", "g2"]),
    ):
        assert [row.split()[0] for row in (await listed(*given))[1]] == found, given
    _, rows = await listed("--limit", "3")
    assert (len(rows), rows[-1]) == (4, "and more: --limit 30")
    assert await listed("--search", "nowhere") == (f"{run_id}: no sample of an ended group matches", [])
    status, output = await asyncio.to_thread(penstock, "samples", run_id, "--outcome", "right", "--api", gateway.url)
    assert (status, "outcome" in output, "Traceback" in output) == (2, True, False)
    with Client(gateway.url) as client:
        found = await asyncio.to_thread(lambda: list(client.samples(run_id)))
    assert [sample.versions for sample in found] == [[3, 4], [], [3, 4], []]


ROW = {"share": 0.25, "gpu_seconds": 900.0, "cpu_seconds": 1800.0, "cost": 12.5}
LEDGER = {
    "run": "r",
    "project": "math",
    "closes": True,
    "currency": "USD",
    "prices": {"gpu_hour": 50.0, "cpu_hour": 0.0},
    "budget": 100.0,
    "gpu_hours_limit": None,
    "tokens": {"generated": 12345, "trained": 12000, "filtered": 345},
    "gpu_seconds": 3600.0,
    "cpu_seconds": 7200.0,
    "cost": 50.0,
    "since": 1000.0,
    "rows": [
        {"use": "trained", "tokens": 12000, **ROW},
        {"use": "filtered", "tokens": 345, **ROW},
        {"use": "idle", "tokens": 0, **ROW, "share": 0.5},
    ],
}


def printed(document: Any, *given: str) -> tuple[int, list[str], str]:
    """Exit status, lines and last requested path of `penstock ledger` where the API answers `document`."""
    with other_server(answer(200, "application/json", json.dumps(document))) as server:
        status, output = penstock("ledger", *given, "--api", server.url)
        return status, output.splitlines(), server.requests[-1][1] if server.requests else ""


def test_the_ledger_of_a_run_is_a_table_with_its_sum() -> None:
    status, lines, path = printed(LEDGER, "r")
    assert (status, path, readable("\n".join(lines))) == (0, "/v1/runs/r/ledger", True)
    assert lines[1] == "12,345 tokens generated: each is in one row"
    assert lines[2] == "budget: 50.00 USD of 100.00 USD is spent"
    heading, *rows = [line.split() for line in lines[lines.index("") + 1 :]]
    assert heading == ["use", "tokens", "share", "gpu", "hours", "cpu", "hours", "cost"]
    assert rows[0] == ["trained", "12,000", "25.0", "%", "0.2500", "0.5000", "12.50", "USD"]
    assert rows[-1] == ["total", "12,345", "100.0", "%", "1.00", "2.00", "50.00", "USD"]
    free = {**LEDGER, "closes": False, "currency": None, "prices": None, "budget": None, "cost": None, "rows": []}
    status, lines, _ = printed({**free, "gpu_hours_limit": 2.0, "since": None}, "r")
    assert (status, lines[1:4]) == (
        0,
        [
            "12,345 tokens generated: the rows do not add up to them",
            "GPU hours: 1.00 of 2 are used",
            "the platform has no prices",
        ],
    )
    status, lines, _ = printed(LEDGER, "r", "--json")
    assert (status, json.loads("\n".join(lines))) == (0, LEDGER)


def test_the_ledger_of_projects_is_a_line_for_each() -> None:
    sums = {name: LEDGER[name] for name in ("tokens", "gpu_seconds", "cpu_seconds", "cost", "rows")}
    document = {"currency": "USD", "projects": [{"project": "math", "runs": 2, **sums}]}
    status, lines, path = printed(document, "--project", "math")
    assert (status, path) == (0, "/v1/ledger?project=math")
    assert lines[1].split() == ["math", "2", "12,345", "12,000", "1.00", "2.00", "50.00", "USD"]
    assert printed({"currency": None, "projects": []})[:2] == (0, ["no projects"])
    assert printed(document, "r", "--project", "math")[:2] == (
        2,
        ["penstock: RUN, --project: give at most one of them"],
    )


async def test_the_ledger_of_a_real_gateway_is_read(redis: Any, gateway: LateGateway, run_id: str) -> None:
    await told(redis, gateway, run_id)
    lane = RunKeys(run_id).lane(Lane.TRAIN)
    await redis.hset(lane.counters, mapping={"tokens_generated": 30, "tokens_trained": 20, "tokens_filtered": 10})
    status, output = await asyncio.to_thread(penstock, "ledger", run_id, "--api", gateway.url)
    assert (status, readable(output), "30 tokens generated: each is in one row" in output) == (0, True, True), output
    rows = {line.split()[0]: line.split()[1] for line in output[output.index("\nuse") :].splitlines() if line}
    assert (rows["trained"], rows["filtered"], rows["idle"], rows["total"]) == ("20", "10", "0", "30")
    assert (await asyncio.to_thread(penstock, "ledger", "--api", gateway.url))[0] == 0


async def test_both_fleets_are_scaled(redis: Any, gateway: LateGateway, run_id: str) -> None:
    await told(redis, gateway, run_id)
    given = ("scale", run_id, "--rollout", "2", "--verifiers", "3", "--api", gateway.url)
    assert await asyncio.to_thread(penstock, *given) == (0, f"{run_id}: 2 rollout replicas and 3 verifiers desired\n")
    record = await RunRecords(redis).get(run_id)
    assert (record.rollout_replicas, record.recipe.verifier.replicas) == (2, 3)


@pytest.mark.parametrize("given", [("--rollout", "2"), ("--verifiers", "3"), ("--rollout", "2", "--verifiers", "3")])
def test_scaling_sends_what_is_given(given: tuple[str, ...], tmp_path: Path) -> None:
    bodies = []

    def respond(request: Any) -> None:
        bodies.append(json.loads(request.rfile.read(int(request.headers["content-length"]))))
        run = {"id": "r", "state": "running", "rollout_replicas": 2}
        answer(202, "application/json", json.dumps(run))(request)

    with other_server(respond) as server:
        status, output = penstock("scale", "r", *given, "--api", server.url)
    names = {"--rollout": "rollout", "--verifiers": "verifier"}
    assert bodies == [{names[name]: int(count) for name, count in zip(given[::2], given[1::2], strict=True)}]
    told = {"--rollout": "2 rollout replicas", "--verifiers": "3 verifiers"}
    assert (status, output) == (0, f"r: {' and '.join(told[name] for name in given[::2])} desired\n")


def test_scaling_needs_a_number() -> None:
    expected = "penstock: --rollout, --verifiers: give at least one of them\n"
    assert penstock("scale", "r", "--api", "http://127.0.0.1:1") == (2, expected)
