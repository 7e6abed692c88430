"""Owns the generation of one response: from a prompt to token ids, from token ids to a payload.

Must not know leases or streams; rollout/tasks.py does.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.engine import Generation, RolloutEngine
from rollout.nuclei import WideNucleusError
from rollout.prompts import ChatTokenizer
from services.contracts import Sampling, Task
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
    same policy version.
    """

    name: str
    prompt_ids: NDArray[np.int32]
    sampling: Sampling
    seed: int | None
    one_version: bool


class ResponseGenerator:
    """Generates responses with a started engine and the model's tokenizer."""

    def __init__(self, engine: RolloutEngine, tokenizer: ChatTokenizer, max_model_len: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

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
        for attempt in range(TRIES):
            started_at = time.time()
            try:
                generation = await self._engine.generate(
                    request.prompt_ids.tolist(), request.sampling, f"{request.name}/{attempt}", request.seed
                )
            except WideNucleusError as error:
                wide = error
                log.warning("response %s is generated again: %s", request.name, error)
                continue
            wide = None
            if not request.one_version or len(generation.spans) == 1:
                return self._payload(request, generation), started_at
            log.info("response %s is mixed-version and is generated again", request.name)
        if wide:
            raise RejectedMessageError(f"response {request.name} was not usable in {TRIES} attempts: {wide}")
        raise MixedVersionError(f"response {request.name} was mixed-version in all {TRIES} attempts")

    def _payload(self, request: ResponseRequest, generation: Generation) -> SamplePayload:
        return SamplePayload(
            request.prompt_ids,
            generation.response_ids,
            generation.behaviour_logprobs,
            self._tokenizer.text(generation.response_ids),
            generation.finish_reason,
            generation.spans,
            generation.nuclei,
        )
