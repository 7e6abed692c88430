"""Owns the generation of one response: from a prompt to token ids, from token ids to a payload.

Must not know leases or streams; rollout/tasks.py does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.engine import RolloutEngine
from rollout.half_drawn import HalfDrawn
from rollout.nuclei import WideNucleusError
from rollout.prompts import ChatTokenizer
from services.contracts import DropReason, Sampling, Task
from services.metrics import DROPPED_TOKENS
from services.streams.delivery.drawn import DrawnTokens, joined_tokens
from services.streams.delivery.partials import Partial
from services.streams.delivery.payloads import SamplePayload
from services.streams.state.group_state import RejectedMessageError

log = logging.getLogger(__name__)

TRIES = 3


class MixedVersionError(RuntimeError):
    """A response that must come from one policy version alone was mixed-version in every attempt."""


@dataclass(frozen=True)
class ResponseRequest:
    """One response to generate.

    `name` is unique among the engine's requests; prompt_ids: int32 [P]; `one_version`: every token must come from the
    same policy version; `kept`: what another replica drew of it, to go on from.
    """

    name: str
    prompt_ids: NDArray[np.int32]
    sampling: Sampling
    seed: int | None
    one_version: bool
    kept: Partial | None = None


class ResponseGenerator:
    """Generates responses with a started engine and the model's tokenizer."""

    def __init__(self, engine: RolloutEngine, tokenizer: ChatTokenizer, max_model_len: int, run: str = "") -> None:
        """`run`: the run whose metrics count."""
        self._engine = engine
        self._run = run
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.half_drawn: dict[str, HalfDrawn] = {}
        """The attempts that are drawn now, by the name of the response."""

    @property
    def version(self) -> int | None:
        """The policy version that the engine holds."""
        return self._engine.version

    def encoded_prompt(self, task: Task) -> NDArray[np.int32]:
        """The task's prompt under the chat template: int32 [P].

        Raises PromptError for a prompt that cannot be answered, RejectedMessageError when the longest response that
        the task requests does not fit after it.
        """
        prompt_ids = self._tokenizer.prompt_ids(task.prompt)
        longest, room = task.sampling.max_new_tokens, self._max_model_len - len(prompt_ids)
        if longest > room:
            raise RejectedMessageError(
                f"sampling.max_new_tokens: {longest} is not valid: expected at most {room}, which is "
                f"model.max_model_len less the prompt's {len(prompt_ids)} tokens"
            )
        return prompt_ids

    async def generate(self, request: ResponseRequest) -> tuple[SamplePayload, float]:
        """One response and when its generation started (Unix seconds).

        After three attempts, raises MixedVersionError, or RejectedMessageError if the engine returned no whole nuclei.
        Raises what RolloutEngine.generate raises.
        """
        wide: WideNucleusError | None = None
        kept = request.kept
        for attempt in range(TRIES):
            started_at = kept.started_at if kept else time.time()
            try:
                tokens, finish_reason = await self._draw(request, f"{request.name}/{attempt}", kept, started_at)
            except WideNucleusError as error:
                wide = error
                log.warning("response %s is generated again: %s", request.name, error)
                continue
            wide = None
            if not request.one_version or len(tokens.spans) == 1:
                return self._payload(request, tokens, finish_reason), started_at
            log.info("response %s is mixed-version and is generated again", request.name)
            DROPPED_TOKENS.labels(self._run, DropReason.VERSION).inc(len(tokens))
            kept = None
        if wide:
            raise RejectedMessageError(f"response {request.name} was not usable in {TRIES} attempts: {wide}")
        raise MixedVersionError(f"response {request.name} was mixed-version in all {TRIES} attempts")

    async def _draw(
        self, request: ResponseRequest, engine_name: str, kept: Partial | None, started_at: float
    ) -> tuple[DrawnTokens, str]:
        """A whole response, from its first token on or after those that are `kept`, and its finish reason."""
        if kept and (finish_reason := self._ended(kept.tokens, request.sampling)):
            return kept.tokens, finish_reason
        sampling, prompt_ids = request.sampling, request.prompt_ids.tolist()
        if kept:
            prompt_ids += kept.tokens.response_ids.tolist()
            sampling = sampling.model_copy(update={"max_new_tokens": sampling.max_new_tokens - len(kept.tokens)})
        with self._drawing(request.name, engine_name, kept, started_at):
            drawn = await self._engine.generate(prompt_ids, sampling, engine_name, request.seed)
        tokens = DrawnTokens(drawn.response_ids, drawn.behaviour_logprobs, drawn.spans, drawn.nuclei)
        return (joined_tokens([kept.tokens, tokens]) if kept else tokens), drawn.finish_reason

    @contextmanager
    def _drawing(self, name: str, engine_name: str, kept: Partial | None, started_at: float) -> Iterator[None]:
        half = self.half_drawn[name] = HalfDrawn(self._engine, engine_name, started_at, kept)
        try:
            yield
        finally:
            if self.half_drawn.get(name) is half:
                del self.half_drawn[name]

    def _ended(self, tokens: DrawnTokens, sampling: Sampling) -> str:
        """The finish reason of a response with these tokens; "" for one that goes on."""
        if int(tokens.response_ids[-1]) in self._tokenizer.stop_ids:
            return "stop"
        return "length" if len(tokens) >= sampling.max_new_tokens else ""

    def _payload(self, request: ResponseRequest, tokens: DrawnTokens, finish_reason: str) -> SamplePayload:
        return SamplePayload(
            request.prompt_ids,
            tokens.response_ids,
            tokens.behaviour_logprobs,
            self._tokenizer.text(tokens.response_ids),
            finish_reason,
            tokens.spans,
            tokens.nuclei,
        )
