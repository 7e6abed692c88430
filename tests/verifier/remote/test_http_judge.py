"""A service of the user's that misbehaves in every way: a clear line for each text, and no verdict invented."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import socket
import time
import tracemalloc
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import SecretStr

from services.settings.rewards.kinds import HttpReward
from tests.verifier.remote.fake_service import (
    FakeService,
    Received,
    Script,
    always,
    http,
    in_turn,
    judging,
    serving,
    silence,
)
from verifier.remote.endpoint import retry_after
from verifier.remote.faults import RemoteSetupError
from verifier.remote.http_judge import HttpJudge
from verifier.remote.protocol import Decision
from verifier.remote.signature import check_signature
from verifier.verifiers.base import Candidate, Judgement, UndecidedError

SECRET = "correct-horse-battery-staple"
VARIABLE = "PENSTOCK_REWARD_TEST"


def candidates(*texts: str) -> list[Candidate]:
    messages = ({"role": "user", "content": "2 + 2?"},)
    return [Candidate(text, {"answer": "4"}, messages, {"level": 1}) for text in texts]


async def judged(service: FakeService, texts: Sequence[str] = ("4",), **options: Any) -> list[Decision]:
    settings = HttpReward(url=f"{service.url}/score", **{"timeout_s": 5, "attempts": 1, **options})
    judge = HttpJudge(settings, environ={VARIABLE: SECRET}, first_pause_s=0.01)
    try:
        return await judge.judge_all(candidates(*texts))
    finally:
        await judge.aclose()


async def fault(script: Script, **options: Any) -> str:
    """The text for the one response that a service is asked about."""
    async with serving(script) as service:
        [decision] = await judged(service, **options)
    assert isinstance(decision, UndecidedError), decision
    assert "\n" not in str(decision)
    assert str(decision).startswith("127.0.0.1: ")
    return str(decision)


async def test_texts_are_judged_in_batches_in_their_order() -> None:
    script = judging(lambda request: {"score": int(request["response"]) / 10, "reason": "so"})
    async with serving(script) as service:
        decisions = await judged(service, [str(number) for number in range(11)], batch=4)
    assert [decision.score for decision in decisions if isinstance(decision, Judgement)] == [
        number / 10 for number in range(11)
    ]
    assert decisions[10] == Judgement(correct=True, score=1.0, reason="so")
    assert sorted(len(got.texts) for got in service.received) == [3, 4, 4]


async def test_a_request_holds_what_is_documented() -> None:
    async with serving(judging(lambda _: {"correct": True})) as service:
        await judged(service)
    [got] = service.received
    assert (got.method, got.path, got.headers["content-type"]) == ("POST", "/score", "application/json")
    assert got.document == {
        "schema_version": 1,
        "requests": [
            {
                "id": "0",
                "prompt": [{"role": "user", "content": "2 + 2?"}],
                "response": "4",
                "reference": "4",
                "metadata": {"level": 1},
            }
        ],
    }


async def test_concurrency_is_bounded() -> None:
    gate = asyncio.Event()

    async def script(got: Received, writer: asyncio.StreamWriter) -> None:
        if len(service.received) == 3:
            gate.set()
        await asyncio.wait_for(gate.wait(), 5)
        writer.write(http(200, json.dumps({"results": [True]}).encode()))

    async with serving(script) as service:
        decisions = await judged(service, ["4"] * 20, batch=1, concurrency=3)
    assert all(isinstance(decision, Judgement) for decision in decisions)
    assert (len(service.received), service.most) == (20, 3)


async def test_a_signature_covers_time_and_body() -> None:
    async with serving(judging(lambda _: {"correct": True})) as service:
        await judged(service, secret=VARIABLE)
    [got] = service.received
    header = got.headers["x-penstock-signature"]
    assert re.fullmatch(r"t=\d+,v1=[0-9a-f]{64}", header)
    check_signature(SecretStr(SECRET), got.body, header, time.time())


async def test_retries_keep_their_request_id() -> None:
    async with serving(in_turn(always(500), always(503), judging(lambda _: {"correct": True}))) as service:
        decisions = await judged(service, attempts=3)
    assert decisions == [Judgement(correct=True, score=1.0)]
    assert len({got.headers["x-penstock-request"] for got in service.received}) == 1
    assert len(service.received) == 3


async def test_status_500_is_tried_as_often_as_set(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(always(500, b"out of\r\nmemory")) as service:
        [decision] = await judged(service, attempts=3)
    assert str(decision) == "127.0.0.1: status 500: out of memory"
    assert len(service.received) == 3
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == [
        f"127.0.0.1: status 500: out of memory; retry {number} of 2" for number in (1, 2)
    ]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 422])
async def test_other_4xx_are_not_repeated(status: int) -> None:
    async with serving(always(status, b"no")) as service:
        [decision] = await judged(service, attempts=3)
    assert str(decision) == f"127.0.0.1: status {status}: no"
    assert len(service.received) == 1


async def test_429_waits_as_the_service_asks() -> None:
    limited = always(429, b"", {"Retry-After": "1"})
    started = time.monotonic()
    async with serving(in_turn(limited, judging(lambda _: {"correct": True}))) as service:
        [decision] = await judged(service, attempts=2)
    assert isinstance(decision, Judgement)
    assert time.monotonic() - started >= 1
    assert len(service.received) == 2


async def test_429_waits_at_most_the_timeout() -> None:
    limited = always(429, b"", {"Retry-After": "86400"})
    started = time.monotonic()
    async with serving(in_turn(limited, judging(lambda _: {"correct": True}))) as service:
        [decision] = await judged(service, attempts=2, timeout_s=0.5)
    assert isinstance(decision, Judgement)
    assert 0.5 <= time.monotonic() - started < 5


def test_retry_after_is_a_number_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    table = {
        "7": 7.0,
        "Thu, 01 Jan 2026 00:00:30 GMT": 30.0,
        "Wed, 31 Dec 2025 00:00:00 GMT": 0.0,
        "soon": None,
        "-3": None,
        "": None,
        "9" * 400: None,
    }
    assert {header: retry_after(header, now) for header in table} == table


async def test_a_slow_service_has_a_deadline() -> None:
    assert await fault(silence, timeout_s=0.3) == "127.0.0.1: no whole answer within 0.3 s (timeout_s)"


async def test_a_trickle_does_not_extend_the_deadline() -> None:
    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    started = time.monotonic()
    assert "no whole answer within 0.5 s" in await fault(script, timeout_s=0.5)
    assert time.monotonic() - started < 4


async def test_half_an_answer_then_silence() -> None:
    async def script(got: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(http(200, b'{"results": [true]}')[:-5])
        await silence(got, writer)

    assert "no whole answer within 0.3 s" in await fault(script, timeout_s=0.3)


async def test_half_an_answer_then_a_closed_connection() -> None:
    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(http(200, b'{"results": [true]}')[:-5])
        writer.close()

    assert "the connection broke" in await fault(script)


async def test_garbage_instead_of_http() -> None:
    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\xff not HTTP\r\n\r\n")

    assert "the connection broke" in await fault(script)


WRONG = {
    "not JSON": (b"<html>oops</html>", "its answer '<html>oops</html>' is not valid: expected JSON"),
    "deep JSON": (b"[" * 100_000, "is not valid: expected JSON"),
    "another shape": ([True], 'its answer [true] is not valid: expected {"results": [...]}'),
    "no results": ({"results": None}, 'expected {"results": [...]}'),
    "too many": ({"results": [True, True]}, "it gave 2 results: expected 1, or results with ids"),
    "none": ({"results": []}, "it gave 0 results: expected 1, or results with ids"),
    "twice": ({"results": [{"id": "0", "score": 1}, {"id": "0", "score": 1}]}, "it gave 2 results for this text"),
    "another id": ({"results": [{"id": "7", "score": 1}]}, "1 of its 1 results have no id of this request"),
    "an id that is a number": ({"results": [{"id": 0, "score": 1}]}, "it gave 0 results for this text: expected 1"),
    "NaN": (b'{"results": [NaN]}', "it returned nan (float), expected a bool, a number from 0 to 1"),
    "2": ({"results": [2]}, "it returned 2 (int), expected"),
    "null": ({"results": [None]}, "it returned None (NoneType), expected"),
    "a text": ({"results": ["1"]}, "it returned '1' (str), expected"),
    "an object": ({"results": [{"id": "0", "points": 1}]}, "it returned {'points': 1} (dict), expected"),
    "its own error": ({"results": [{"id": "0", "error": "no\nGPU"}]}, "127.0.0.1: no GPU"),
}


@pytest.mark.parametrize(("answer", "expected"), WRONG.values(), ids=WRONG)
async def test_a_wrong_answer_is_unknown(answer: Any, expected: str) -> None:
    assert expected in await fault(always(200, answer))


async def test_a_wrong_result_touches_no_other_text() -> None:
    results = [
        {"id": "3", "correct": False, "score": 0.5, "reason": "half"},
        {"id": "0", "score": 1},
        {"id": "1", "score": 2},
        {"id": "2", "score": 1},
        {"id": "2", "score": 0},
        {"id": "x", "score": 1},
    ]
    async with serving(always(200, {"results": results})) as service:
        first, second, third, fourth, fifth = await judged(service, ["4"] * 5)
    assert first == Judgement(correct=True, score=1.0)
    assert fourth == Judgement(correct=False, score=0.5, reason="half")
    assert "it returned {'score': 2}" in str(second)
    assert "it gave 2 results for this text: expected 1" in str(third)
    assert "it gave 0 results for this text: expected 1; 1 of its 6 results" in str(fifth)


async def test_a_reference_that_is_no_json_touches_no_other() -> None:
    async with serving(judging(lambda _: {"correct": True})) as service:
        judge = HttpJudge(HttpReward(url=service.url))
        bad = [Candidate("a", {"answer": float("nan")}), Candidate("\ud800", {"answer": 1}), Candidate("b", {"x": {1}})]
        decisions = await judge.judge_all([*bad, *candidates("4")])
        await judge.aclose()
    assert ["expected what JSON in UTF-8 can hold" in str(decision) for decision in decisions] == [True] * 3 + [False]
    assert decisions[3] == Judgement(correct=True, score=1.0)


async def test_a_redirect_names_where_it_points() -> None:
    async with serving(always(200, {"results": [True]})) as other:
        moved = always(307, b"", {"Location": f"http://localhost:{other.port}/secret?token=1"})
        text = await fault(moved, attempts=3)
    assert "it redirects (status 307) to localhost: redirects are not followed" in text
    assert "token" not in text
    assert other.received == []


async def test_one_gigabyte_is_not_read() -> None:
    sent = 0

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
        for _ in range(1024):
            writer.write(b" " * (1 << 20))
            await writer.drain()
            sent += 1

    assert await fault(script) == "127.0.0.1: its answer is too long: expected at most 16 MiB"
    assert sent < 64


async def test_a_gzip_bomb_is_not_opened() -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    tracemalloc.start()
    try:
        text = await fault(always(200, bomb, {"Content-Encoding": "gzip"}))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text == "127.0.0.1: content-encoding: 'gzip' is not valid: expected identity"
    assert peak < 8 << 20


async def test_a_refused_connection_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    judge = HttpJudge(HttpReward(url=f"http://127.0.0.1:{port}", attempts=2), first_pause_s=0.01)
    [decision] = await judge.judge_all(candidates("4"))
    await judge.aclose()
    assert str(decision).startswith("127.0.0.1: no connection: ")
    assert "retry 1 of 1" in caplog.text


async def test_an_address_that_answers_is_found() -> None:
    async with serving(judging(lambda _: {"correct": True})) as service:  # localhost may be ::1 first
        judge = HttpJudge(HttpReward(url=f"http://localhost:{service.port}/score", attempts=1))
        decisions = await judge.judge_all(candidates("4"))
        await judge.aclose()
    assert decisions == [Judgement(correct=True, score=1.0)]
    assert service.received[0].headers["host"] == f"localhost:{service.port}"


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(judging(lambda _: {"correct": True})) as service:
        assert await judged(service) == [Judgement(correct=True, score=1.0)]


async def test_a_cancelled_judgement_ends_its_requests() -> None:
    async with serving(silence) as service:
        judge = HttpJudge(HttpReward(url=service.url, batch=1))
        task = asyncio.create_task(judge.judge_all(candidates("4", "5")))
        await service.got(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await judge.aclose()


async def test_the_breaker_opens_and_closes(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    async with serving(in_turn(always(500), always(500), always(500), judging(lambda _: {"correct": True}))) as service:
        settings = HttpReward(url=service.url, attempts=1, breaker_failures=2, breaker_s=30)
        judge = HttpJudge(settings, clock=lambda: now)
        for _ in range(2):
            await judge.judge_all(candidates("4"))
        [refused] = await judge.judge_all(candidates("4"))
        assert "no request is sent for another 30.0 s, after 2 failures in a row; the last one: status 500" in str(
            refused
        )
        assert len(service.received) == 2
        now = 31.0
        [probe] = await judge.judge_all(candidates("4"))
        assert "status 500" in str(probe)
        await judge.judge_all(candidates("4"))
        assert len(service.received) == 3  # the probe failed: closed again for 30 s
        now = 62.0
        assert await judge.judge_all(candidates("4", "5")) == [Judgement(correct=True, score=1.0)] * 2
        await judge.aclose()
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(",")[0] for message in messages] == [
        "127.0.0.1: no request is sent for 30 s",
        "127.0.0.1: no request is sent for 30 s",
        "127.0.0.1: it answers again; requests are sent again",
    ]


@pytest.mark.parametrize(
    ("environ", "state"), [({}, "not set"), ({VARIABLE: " \n"}, "empty"), ({VARIABLE: "a\nb"}, "not valid")]
)
def test_a_secret_that_is_missing_is_an_error(environ: dict[str, str], state: str) -> None:
    with pytest.raises(RemoteSetupError, match=f"http.secret: the variable {VARIABLE} is {state}") as caught:
        HttpJudge(HttpReward(url="http://127.0.0.1:1", secret=VARIABLE), environ=environ)
    assert "a\nb" not in str(caught.value)


async def test_secrets_are_in_no_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def echo(got: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(http(500, f"you said {SECRET}".encode()))

    caplog.set_level(logging.DEBUG)
    async with serving(echo) as service:
        settings = HttpReward(url=service.url, attempts=2, secret=VARIABLE)
        judge = HttpJudge(settings, environ={VARIABLE: SECRET}, first_pause_s=0.01)
        [decision] = await judge.judge_all(candidates("4"))
        assert SECRET not in f"{vars(judge)} {decision!r} {caplog.text}"
        await judge.aclose()
    assert str(decision) == "127.0.0.1: status 500: you said [secret]"


@pytest.mark.parametrize("secret", ['with "quotes"/and slashes', "short", "base64/+secret=="])
async def test_an_escaped_secret_is_hidden_as_well(secret: str) -> None:
    said = json.dumps({"results": [{"id": "0", "error": f"you said {secret}"}]})
    for body in (said, said.replace("/", "\\/")):
        async with serving(always(200, body.encode())) as service:
            judge = HttpJudge(HttpReward(url=service.url, secret=VARIABLE), environ={VARIABLE: secret})
            [decision] = await judge.judge_all(candidates("4"))
            await judge.aclose()
        assert str(decision) == f"127.0.0.1: you said {secret if len(secret) < 8 else '[secret]'}"


async def test_a_host_that_is_not_allowed_gets_nothing() -> None:
    async with serving(judging(lambda _: {"correct": True})) as service:
        with pytest.raises(RemoteSetupError) as caught:
            HttpJudge(HttpReward(url=service.url), allowed_hosts=frozenset({"rewards.internal", "b.example"}))
    assert str(caught.value) == (
        "http.url: '127.0.0.1' is not valid: expected a host that verifier.rewardHosts of the chart allows: "
        "one of b.example, rewards.internal"
    )
    assert service.received == []


async def test_a_metadata_address_gets_nothing() -> None:
    for host in ("169.254.169.254", "2852039166", "[::ffff:169.254.169.254]", "[fe80::1]"):
        judge = HttpJudge(HttpReward(url=f"http://{host}/latest/meta-data", attempts=1))
        [decision] = await judge.judge_all(candidates("4"))
        await judge.aclose()
        assert "is refused: link-local and metadata addresses get no requests" in str(decision)
