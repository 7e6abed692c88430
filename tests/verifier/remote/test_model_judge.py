"""A judge model behind a server of the test: what it is asked, what it may answer, what that costs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from services.settings.rewards.kinds import JudgeReward
from tests.verifier.remote.fake_service import FakeService, Received, Script, always, http, in_turn, serving, silence
from verifier.remote.budget import LocalBudget
from verifier.remote.faults import RemoteSetupError
from verifier.remote.model_judge import ModelJudge, chat_url
from verifier.verifiers.base import Candidate, Judgement, UndecidedError

RUBRIC = "Correct answers get 1, others 0."
KEY = "sk-very-secret"
VARIABLE = "PENSTOCK_REWARD_KEY"
FOUR = Candidate("It is 4.", {"answer": "4"}, ({"role": "user", "content": "2 + 2?"},))


def completion(content: Any, **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": "stop"}], **more}


def answering(content: str, **more: Any) -> Script:
    return always(200, completion(content, **more))


def judge_of(service: FakeService, *, budget: LocalBudget | None = None, **options: Any) -> ModelJudge:
    settings = {"url": f"{service.url}/v1", "model": "judge", "rubric": "./rubric.txt", "attempts": 1, **options}
    environ: Mapping[str, str] = {VARIABLE: KEY}
    return ModelJudge(JudgeReward(**settings), RUBRIC, budget=budget, environ=environ, first_pause_s=0.01)


async def outcome(script: Script, candidate: Candidate = FOUR, **options: Any) -> str | Judgement:
    async with serving(script) as service:
        judge = judge_of(service, **options)
        [decision] = await judge.judge_all([candidate])
        await judge.aclose()
    return str(decision) if isinstance(decision, UndecidedError) else decision


async def test_a_judge_is_asked_as_its_api_wants() -> None:
    async with serving(answering('{"score": 1, "reason": "so"}')) as service:
        judge = judge_of(service, key=VARIABLE, answer_tokens=99)
        assert await judge.judge_all([FOUR]) == [Judgement(correct=True, score=1.0, reason="so")]
        await judge.aclose()
    [got] = service.received
    assert (got.method, got.path) == ("POST", "/v1/chat/completions")
    assert got.headers["authorization"] == f"Bearer {KEY}"
    document = got.document
    assert [message["role"] for message in document.pop("messages")] == ["system", "user"]
    assert document == {
        "model": "judge",
        "temperature": 0.0,
        "max_tokens": 99,
        "response_format": {"type": "json_object"},
    }


@pytest.mark.parametrize(
    ("url", "chat"),
    [
        ("http://a/v1", "http://a/v1/chat/completions"),
        ("http://a/v1/", "http://a/v1/chat/completions"),
        ("http://a/v1/chat/completions", "http://a/v1/chat/completions"),
        ("http://a:8000", "http://a:8000/chat/completions"),
        ("http://a/openai?api-version=1", "http://a/openai/chat/completions?api-version=1"),
    ],
)
def test_the_address_may_name_the_completions(url: str, chat: str) -> None:
    assert chat_url(url) == chat


@pytest.mark.parametrize(("score", "correct"), [(0.7, True), (0.69, False)])
async def test_a_score_is_correct_from_the_threshold(score: float, correct: bool) -> None:
    decision = await outcome(answering(json.dumps({"score": score, "reason": ""})), threshold=0.7)
    assert decision == Judgement(correct=correct, score=score)


async def test_prose_is_asked_once_more_then_unknown() -> None:
    async with serving(answering("I would say it is quite good.")) as service:
        judge = judge_of(service)
        [decision] = await judge.judge_all([FOUR])
        await judge.aclose()
    assert str(decision) == (
        "127.0.0.1: it answered 'I would say it is quite good.': expected exactly one JSON object "
        '{"score": number from 0 to 1, "reason": text}; asked 2 times'
    )
    assert len(service.received) == 2
    assert service.received[0].document["messages"] != service.received[1].document["messages"]  # another mark


async def test_a_second_answer_can_be_right() -> None:
    assert await outcome(in_turn(answering("hm"), answering('{"score": 0}'))) == Judgement(correct=False, score=0.0)


async def test_a_cut_answer_names_its_limit() -> None:
    cut = {"choices": [{"message": {"content": '{"score": '}, "finish_reason": "length"}]}
    assert "(cut after answer_tokens: 512)" in str(await outcome(always(200, cut)))


@pytest.mark.parametrize("answer", [{}, [], {"choices": []}, {"choices": [{"message": {"content": None}}]}, "text"])
async def test_an_answer_of_another_shape_is_unknown(answer: Any) -> None:
    assert "expected choices[0].message.content" in str(await outcome(always(200, answer)))


async def test_a_text_that_the_model_refuses_is_unknown() -> None:
    async with serving(always(400, {"error": {"message": "maximum context length"}})) as service:
        judge = judge_of(service, breaker_failures=1)
        for _ in range(3):
            [decision] = await judge.judge_all([FOUR])
            assert "status 400" in str(decision)
            assert "maximum context length" in str(decision)
        await judge.aclose()
    assert len(service.received) == 3  # the breaker stays closed


async def test_equal_questions_are_asked_once() -> None:
    gate = asyncio.Event()

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(http(200, json.dumps(completion('{"score": 1}')).encode()))

    async with serving(script) as service:
        judge = judge_of(service)
        tasks = [asyncio.create_task(judge.judge_all([FOUR, FOUR])) for _ in range(5)]
        await service.got(1)
        gate.set()
        decisions = await asyncio.gather(*tasks)
        assert decisions == [[Judgement(correct=True, score=1.0)] * 2] * 5
        await judge.judge_all([FOUR])
        assert len(service.received) == 1
        await judge.judge_all([Candidate("It is 5.", FOUR.reference, FOUR.messages)])
        await judge.judge_all([Candidate(FOUR.text, {"answer": 4}, FOUR.messages)])
        await judge.judge_all([Candidate(FOUR.text, FOUR.reference, ())])
        assert len(service.received) == 4
        await judge.aclose()


async def test_random_judges_are_asked_each_time() -> None:
    async with serving(answering('{"score": 1}')) as service:
        judge = judge_of(service, temperature=0.5)
        await judge.judge_all([FOUR, FOUR])
        await judge.aclose()
    assert len(service.received) == 2


async def test_a_failure_is_not_kept() -> None:
    async with serving(in_turn(always(404, b""), answering('{"score": 1}'))) as service:
        judge = judge_of(service)
        [first] = await judge.judge_all([FOUR])
        assert isinstance(first, UndecidedError)
        assert await judge.judge_all([FOUR]) == [Judgement(correct=True, score=1.0)]
        await judge.aclose()


async def test_one_of_two_waiting_can_be_cancelled() -> None:
    gate = asyncio.Event()

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(http(200, json.dumps(completion('{"score": 1}')).encode()))

    async with serving(script) as service:
        judge = judge_of(service)
        first, second = (asyncio.create_task(judge.judge_all([FOUR])) for _ in range(2))
        await service.got(1)
        first.cancel()
        await asyncio.wait([first])
        gate.set()
        assert await second == [Judgement(correct=True, score=1.0)]
        await judge.aclose()
    assert len(service.received) == 1


async def test_a_cancelled_judgement_ends_its_question() -> None:
    async with serving(silence) as service:
        judge = judge_of(service)
        task = asyncio.create_task(judge.judge_all([FOUR]))
        await service.got(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) <= 3  # this one, and the server's
        await judge.aclose()


Budgets = Callable[[], LocalBudget]
SPENT: dict[str, tuple[Budgets, dict[str, int], str]] = {
    "requests": (lambda: LocalBudget(max_requests=1), {"max_requests": 1}, "budget of 1 requests (judge.max_requests)"),
    "tokens": (
        lambda: LocalBudget(max_tokens=1500),
        {"max_tokens": 1500},
        "budget of 1,500 tokens (judge.max_tokens)",
    ),
}


@pytest.mark.parametrize(("budget", "options", "text"), SPENT.values(), ids=SPENT)
async def test_a_spent_budget_is_named(budget: Budgets, options: dict[str, int], text: str) -> None:
    async with serving(answering('{"score": 1}')) as service:
        judge = judge_of(service, budget=budget(), **options)
        [first] = await judge.judge_all([FOUR])
        assert isinstance(first, Judgement)
        [second] = await judge.judge_all([Candidate("5", FOUR.reference)])
        assert str(second) == f"127.0.0.1: not asked: the run's {text} is spent"
        assert await judge.judge_all([FOUR]) == [first]  # the cache costs nothing
        await judge.aclose()
    assert len(service.received) == 1


async def test_a_budget_is_settled_by_reported_usage() -> None:
    budget = LocalBudget(max_requests=10, max_tokens=10_000)
    await outcome(answering('{"score": 1}', usage={"total_tokens": 123}), budget=budget)
    assert (budget.requests, budget.tokens) == (9, 10_000 - 123)


@pytest.mark.parametrize("usage", [None, {}, {"total_tokens": -5}, {"total_tokens": "9"}, {"total_tokens": True}])
async def test_without_usage_the_estimate_is_taken(usage: Any) -> None:
    budget = LocalBudget(max_tokens=10_000)
    await outcome(answering('{"score": 1}', usage=usage), budget=budget, answer_tokens=1000)
    assert 10_000 - 2000 < budget.tokens < 10_000 - 1000


async def test_failures_give_their_tokens_back() -> None:
    budget = LocalBudget(max_requests=10, max_tokens=10_000)
    await outcome(always(500), budget=budget, attempts=3)
    assert (budget.requests, budget.tokens) == (7, 10_000)


async def test_a_key_is_in_no_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(always(401, f"invalid key {KEY}".encode())) as service:
        judge = judge_of(service, key=VARIABLE, attempts=2)
        [decision] = await judge.judge_all([FOUR])
        assert KEY not in f"{vars(judge)} {decision!r} {caplog.text}"
        await judge.aclose()
    assert str(decision) == "127.0.0.1: status 401: invalid key [secret]"


def test_a_key_that_is_missing_is_an_error() -> None:
    settings = JudgeReward(url="http://a/v1", model="m", rubric="./r.txt", key=VARIABLE)
    with pytest.raises(RemoteSetupError, match=f"judge.key: the variable {VARIABLE} is not set"):
        ModelJudge(settings, RUBRIC, environ={})


def test_a_host_that_is_not_allowed_is_an_error() -> None:
    settings = JudgeReward(url="http://a/v1", model="m", rubric="./r.txt")
    with pytest.raises(RemoteSetupError, match=r"judge\.url: 'a' is not valid"):
        ModelJudge(settings, RUBRIC, allowed_hosts=frozenset({"b"}))
