"""Owns an engine that draws one token per step, each a function of the tokens before it and of the policy version.

So a response is the same however many engines draw it. Must not be used outside tests; the real engine is in
tests/rollout/test_weight_sync.py.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.engine import Generation
from services.contracts import Sampling, VersionSpan
from services.streams.delivery.drawn import DrawnTokens, joined_tokens, tokens_from
from services.streams.delivery.nucleus import Nuclei
from services.streams.delivery.payloads import SamplePayload

STOP = 3
STEP_S = 0.0005


def drawn_after(index: int, context: Sequence[int], top_k: int | None) -> tuple[int, float, list[int]]:
    """The next token of sample `index` after these, its log-prob and its nucleus. Sample 0 stops sooner or later."""
    state = zlib.crc32(np.array(context, "<i4").tobytes(), index)
    token = STOP if index == 0 and len(context) > 80 and state % 8 == 0 else 4 + state % 90
    nucleus = [token, *range(100, 100 + state % (top_k or 1))]
    return token, -(state % 1000) / 250, nucleus


class StepEngine:
    """Runs requests step by step. `version` may change between two steps; `drawn_tokens` counts what was drawn."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.drawn_tokens = 0
        self._awaited: dict[int, asyncio.Event] = {}
        self._running: dict[str, DrawnTokens] = {}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, name: str, _seed: int | None = None
    ) -> Generation:
        """Draw until a stop token or the longest response."""
        context, index = list(prompt_ids), int(name.split("/")[1])
        tokens = self._running[name] = _drawn([], [], [], self.version, sampling.top_k)
        try:
            while len(tokens) < sampling.max_new_tokens:
                await asyncio.sleep(STEP_S)
                token, logprob, nucleus = drawn_after(index, context, sampling.top_k)
                context.append(token)
                self._count()
                step = _drawn([token], [logprob], nucleus, self.version, sampling.top_k)
                tokens = self._running[name] = joined_tokens([tokens, step])
                if token == STOP:
                    break
        finally:
            del self._running[name]
        reason = "stop" if context[-1] == STOP else "length"
        return Generation(tokens.response_ids, tokens.behaviour_logprobs, tokens.spans, reason, tokens.nuclei)

    def check(self) -> None:
        """It does not die."""

    async def declare(self, version: int) -> None:
        """Hold this version."""
        self.version = version

    def _count(self) -> None:
        self.drawn_tokens += 1
        for tokens, event in self._awaited.items():
            if self.drawn_tokens >= tokens:
                event.set()

    async def until_drawn(self, tokens: int) -> None:
        """Until it has drawn so many tokens in all."""
        event = self._awaited.setdefault(tokens, asyncio.Event())
        async with asyncio.timeout(30):
            if self.drawn_tokens < tokens:
                await event.wait()

    def drawn(self, name: str, start: int) -> DrawnTokens | None:
        """The tokens of a running request from `start` on."""
        tokens = self._running.get(name)
        return tokens_from(tokens, start) if tokens and len(tokens) > start else None


def _drawn(ids: list[int], logprobs: list[float], nucleus: list[int], version: int, top_k: int | None) -> DrawnTokens:
    spans = (VersionSpan(version=version, start=0, end=1),) if ids else ()
    nuclei = Nuclei(np.array(nucleus, np.int32), np.array([0, len(nucleus)][: 1 + len(ids)], np.int32))
    return DrawnTokens(np.array(ids, np.int32), np.array(logprobs, np.float32), spans, nuclei if top_k else None)


def undisturbed(index: int, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """What one engine draws as sample `index` for this prompt; see `content`."""
    context, logprobs, nuclei = list(prompt_ids), [], []
    while len(logprobs) < sampling.max_new_tokens and STOP not in context[len(prompt_ids) :]:
        token, logprob, nucleus = drawn_after(index, context, sampling.top_k)
        context.append(token)
        logprobs.append(np.float32(logprob))
        nuclei.append(nucleus)
    return {
        "ids": context[len(prompt_ids) :],
        "logprobs": logprobs,
        "nuclei": nuclei if sampling.top_k else None,
        "reason": "stop" if context[-1] == STOP else "length",
    }


def content(payload: SamplePayload) -> dict[str, Any]:
    """A payload in the form of `undisturbed`."""
    nuclei = payload.nuclei
    return {
        "ids": payload.response_ids.tolist(),
        "logprobs": payload.behaviour_logprobs.tolist(),
        "nuclei": nuclei and [part.tolist() for part in np.split(nuclei.ids, nuclei.offsets[1:-1])],
        "reason": payload.finish_reason,
    }
