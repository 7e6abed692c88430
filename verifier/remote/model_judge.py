"""Owns the reward `judge:`: a model behind an OpenAI-compatible API grades by a rubric.

Must not ask twice for what it knows, nor beyond its budget.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from services.settings.rewards.kinds import JudgeReward
from verifier.remote.budget import Budget, BudgetSpentError, RequestMeter, UnlimitedBudget, estimated_tokens
from verifier.remote.cache import Grade, GradeCache
from verifier.remote.endpoint import FIRST_PAUSE_S, Endpoint, Outgoing
from verifier.remote.faults import ServiceFaultError, one_line
from verifier.remote.http_judge import signed_headers
from verifier.remote.messages import GradeFormatError, judge_messages, question, read_grade
from verifier.remote.protocol import Decision, parsed
from verifier.remote.signature import secret_from
from verifier.verifiers.base import Candidate, Judgement, UndecidedError

CHAT = "/chat/completions"
FORMAT_ATTEMPTS = 2
"""How often a judge is asked whose answer holds no grade."""


class ModelJudge:
    """Judges by a model, for one event loop. `rubric`: the content of the rubric's file.

    `allowed_hosts`: None allows any. Raises RemoteSetupError: its host is not allowed, its key's variable is unset.
    """

    def __init__(
        self,
        options: JudgeReward,
        rubric: str,
        *,
        budget: Budget | None = None,
        cache: GradeCache | None = None,
        allowed_hosts: frozenset[str] | None = None,
        environ: Mapping[str, str] = os.environ,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._rubric = rubric
        self._budget = budget or UnlimitedBudget()
        self._cache = cache or GradeCache()
        self._key = secret_from(environ, "judge.key", options.key) if options.key else None
        self._endpoint = Endpoint(
            "judge.url",
            options.model_copy(update={"url": chat_url(options.url)}),
            allowed_hosts=allowed_hosts,
            hidden=(self._key,) if self._key else (),
            first_pause_s=first_pause_s,
            clock=clock,
        )

    async def judge_all(self, candidates: Sequence[Candidate]) -> list[Decision]:
        """The decision on each candidate in turn. A fault of the judge or of a text is an UndecidedError in it."""
        async with asyncio.TaskGroup() as questions:
            asked = [questions.create_task(self._judge(candidate)) for candidate in candidates]
        return [task.result() for task in asked]

    async def aclose(self) -> None:
        """Close its connections."""
        await self._endpoint.aclose()

    async def _judge(self, candidate: Candidate) -> Decision:
        try:
            digest = self._digest(candidate)
        except (TypeError, ValueError, RecursionError) as error:
            return UndecidedError(
                one_line(f"response or reference: not valid: expected what JSON in UTF-8 can hold: {error}")
            )
        try:
            if self._options.temperature == 0:
                grade = await self._cache.grade(digest, lambda: self._graded(candidate))
            else:
                grade = await self._graded(candidate)
        except (ServiceFaultError, BudgetSpentError) as fault:
            return UndecidedError(str(fault))
        return Judgement(grade.score >= self._options.threshold, grade.score, reason=grade.reason)

    def _digest(self, candidate: Candidate) -> bytes:
        asked = [self._options.model, self._options.temperature, *question(self._rubric, candidate)]
        return hashlib.sha256(json.dumps(asked, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()).digest()

    async def _graded(self, candidate: Candidate) -> Grade:
        fault = ""
        for _ in range(FORMAT_ATTEMPTS):
            content, cut = await self._asked(judge_messages(self._rubric, candidate))
            try:
                return read_grade(content)
            except GradeFormatError as error:
                limit = f" (cut after answer_tokens: {self._options.answer_tokens})" if cut else ""
                fault = f"{self._endpoint.host}: {error}{limit}"
        raise ServiceFaultError(f"{fault}; asked {FORMAT_ATTEMPTS} times")

    async def _asked(self, messages: list[dict[str, str]]) -> tuple[str, bool]:
        """The model's answer, and whether it was cut."""
        document = {
            "model": self._options.model,
            "messages": messages,
            "temperature": self._options.temperature,
            "max_tokens": self._options.answer_tokens,
            "response_format": {"type": "json_object"},
        }
        characters = sum(len(message["content"]) for message in messages)
        tokens = estimated_tokens(characters, self._options.answer_tokens)
        limits = (self._options.max_requests, self._options.max_tokens)
        meter = RequestMeter(self._budget, tokens, self._endpoint.host, limits)
        body = json.dumps(document).encode()
        answer = parsed(self._endpoint.host, await self._endpoint.send(Outgoing(body, self._headers(body)), meter))
        await meter.used(used_tokens(answer))
        return read_answer(self._endpoint.host, answer)

    def _headers(self, body: bytes) -> Callable[[], Mapping[str, str]]:
        plain = signed_headers(body, None)
        return lambda: plain() | _bearer(self._key)


def _bearer(key: SecretStr | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}


def chat_url(url: str) -> str:
    """The address of the chat completions below `url`, which may end in /v1 or name them already."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(CHAT) else path + CHAT).geturl()


def used_tokens(answer: Any) -> int | None:
    """The tokens that an answer reports as used; None if it reports none."""
    usage = answer.get("usage") if isinstance(answer, Mapping) else None
    total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return total if isinstance(total, int) and not isinstance(total, bool) and total >= 0 else None


def read_answer(host: str, answer: Any) -> tuple[str, bool]:
    """The text of a chat completion, and whether it was cut at its limit. Raises ServiceFaultError."""
    try:
        choice = answer["choices"][0]
        content, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
    except (TypeError, KeyError, IndexError, AttributeError):
        content, cut = None, False
    if not isinstance(content, str):
        shown = one_line(json.dumps(answer)[:400], 80)
        raise ServiceFaultError(f"{host}: its answer {shown} is not valid: expected choices[0].message.content")
    return content, cut
