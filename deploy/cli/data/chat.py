"""Owns the conversation with a model behind an OpenAI-compatible API: one question, one answer.

Must not know what is asked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from pydantic import SecretStr

from services.settings.rewards.kinds import RemoteReward
from verifier.remote.endpoint import Endpoint, Outgoing
from verifier.remote.faults import ServiceFaultError
from verifier.remote.model_judge import chat_url, read_answer
from verifier.remote.protocol import parsed

log = logging.getLogger(__name__)

JSON_MODE: dict[str, Any] = {"response_format": {"type": "json_object"}}


class ChatModel:
    """A model, for one event loop. `options`: where it is, and its deadline, attempts and concurrency.

    `answer_tokens`: the most tokens of an answer. Raises RemoteSetupError.
    """

    def __init__(self, options: RemoteReward, model: str, key: SecretStr | None, answer_tokens: int) -> None:
        url = chat_url(options.url)
        hidden = (key,) if key else ()
        self._endpoint = Endpoint("--url", options.model_copy(update={"url": url}), hidden=hidden)
        self._model, self._key, self._answer_tokens = model, key, answer_tokens
        self._takes_json_mode: bool | None = None  # unknown until a request has succeeded

    async def __aenter__(self) -> ChatModel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._endpoint.aclose()

    @property
    def answered(self) -> bool:
        """Whether a request has succeeded."""
        return self._takes_json_mode is not None

    async def ask(self, messages: list[dict[str, str]]) -> str:
        """The model's answer. Raises ServiceFaultError after the last attempt.

        Some services refuse requests for JSON. Until a request has succeeded, a refused one is sent once more without.
        """
        if self._takes_json_mode is not False:
            try:
                content = await self._answer(messages, JSON_MODE)
            except ServiceFaultError as fault:
                if fault.blamed or self._takes_json_mode:
                    raise
                log.info("%s; sent once more without response_format", fault)
            else:
                self._takes_json_mode = True
                return content
        content = await self._answer(messages, {})
        if self._takes_json_mode is None:
            self._takes_json_mode = False
            log.warning("%s: it refuses response_format, so that requests are sent without it", self._endpoint.host)
        return content

    async def _answer(self, messages: list[dict[str, str]], more: Mapping[str, Any]) -> str:
        document: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self._answer_tokens,
            **more,
        }
        body = await self._endpoint.send(Outgoing(json.dumps(document).encode(), self._headers))
        content, _ = read_answer(self._endpoint.host, parsed(self._endpoint.host, body))
        return content

    def _headers(self) -> Mapping[str, str]:
        given = {"Content-Type": "application/json"}
        return given | ({"Authorization": f"Bearer {self._key.get_secret_value()}"} if self._key else {})
