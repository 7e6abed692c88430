"""Owns an inference engine and a tokenizer without a model: answers at once, and holds whichever version it is told.

Must not be used outside tests and benchmarks. The code around it (rollout.generation, rollout.weight_sync) is real.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine import Generation
from rollout.staging import StagingProgress
from services.contracts import Prompt, Sampling, VersionSpan, WeightPlan
from services.streams.delivery.drawn import DrawnTokens, spans_within, tokens_from

RIGHT, WRONG = 1, 0
"""The first token of a response that the workload's pattern accepts, and of one that it does not."""


@dataclass(frozen=True)
class Answers:
    """How the stub answers: `filtered` is the share of groups without a mixed result; `delay_s` per response.

    All other groups have as many right responses as wrong ones. Which groups are filtered depends on `seed` alone.
    """

    filtered: float = 0.0
    prompt_tokens: int = 16
    response_tokens: int = 32
    delay_s: float = 0.0
    seed: int = 0

    def right(self, group: str, index: int) -> bool:
        """Whether sample `index` of a group is right: the same on every replica, however often it is generated."""
        chosen = zlib.crc32(f"{self.seed} {group}".encode())
        if chosen / 2**32 < self.filtered:
            return bool(chosen & 1)
        return index % 2 == 0


class StubEngine:
    """Stands in for rollout.engine.RolloutEngine."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.version = 0
        self._running: dict[str, tuple[float, DrawnTokens]] = {}
        self._staged = ""
        self._whole: dict[tuple[bool, int], DrawnTokens] = {}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, seed: int | None = None
    ) -> Generation:
        """A response of the version held now, after the tokens that are in the prompt already.

        The request's name says which sample it is.
        """
        group, index = request_id.split("/")[:2]
        tokens = self._answer(self._answers.right(group, int(index)))
        kept = max(0, len(prompt_ids) - self._answers.prompt_tokens)
        rest = tokens_from(tokens, kept) if kept else tokens
        if self._answers.delay_s:
            self._running[request_id] = time.monotonic(), rest
            try:
                await asyncio.sleep(self._answers.delay_s * len(rest) / len(tokens))
            finally:
                del self._running[request_id]
        return Generation(rest.response_ids, rest.behaviour_logprobs, rest.spans, "stop")

    def _answer(self, right: bool) -> DrawnTokens:
        """The whole response of the version held now; made once, because benchmarks count what a stub takes."""
        known = self._whole.get((right, self.version))
        if known is None:
            size = self._answers.response_tokens
            ids = np.full(size, WRONG, np.int32)
            ids[0] = RIGHT if right else WRONG
            spans = (VersionSpan(version=self.version, start=0, end=size),)
            known = self._whole[right, self.version] = DrawnTokens(ids, np.full(size, -0.5, np.float32), spans)
        return known

    def drawn(self, request_id: str, start: int) -> DrawnTokens | None:
        """The tokens of a running request that a steady engine would have by now; never the last one."""
        began, rest = self._running.get(request_id, (0.0, None))
        if rest is None:
            return None
        per_token_s = self._answers.delay_s / self._answers.response_tokens
        end = min(len(rest) - 1, int((time.monotonic() - began) / per_token_s))
        if end <= start:
            return None
        spans = spans_within(rest.spans, start, end)
        return DrawnTokens(rest.response_ids[start:end], rest.behaviour_logprobs[start:end], spans)

    async def call_workers(self, method: str, *args: Any, deadline_s: float = 0.0) -> list[Any]:
        """The worker's side of a weight sync, without weights."""
        if method == "stage_weights":
            self._staged = args[0]
        return [StagingProgress("staged").as_dict()] if method == "staging_progress" else []

    async def apply_staged(self, version: int, deadline_s: float) -> None:
        """Hold the version that was staged."""
        staged = WeightPlan.model_validate_json(self._staged).version
        assert staged == version, f"version {version} is to be applied, but {staged} was staged"
        self.version = version

    async def declare(self, version: int) -> None:
        """Hold `version` without a sync."""
        self.version = version

    def check(self) -> None:
        """A stub never dies by itself."""


class StubTokenizer:
    """Stands in for rollout.prompts.ChatTokenizer."""

    stop_ids = ()

    def __init__(self, answers: Answers) -> None:
        self._prompt = np.arange(answers.prompt_tokens, dtype=np.int32)
        self._texts = {first: word + " word" * (answers.response_tokens - 1) for first, word in _WORDS.items()}

    def prompt_ids(self, prompt: Prompt) -> NDArray[np.int32]:
        """The same tokens for every prompt."""
        return self._prompt

    def text(self, response_ids: NDArray[np.int32]) -> str:
        """A text of about five bytes per token, whose first word is the answer."""
        return self._texts[int(response_ids[0])]


_WORDS = {RIGHT: "right", WRONG: "wrong"}
