"""Owns text <-> tokens: the chat template, the model's stop tokens, and decoding.

Must not call the engine, which handles token ids only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from services.contracts import Cause, Prompt
from services.settings import NO_TEMPLATE
from services.settings.faults import shown
from services.storage.models import local_text

if TYPE_CHECKING:
    from jinja2 import TemplateError

NO_FILES: Mapping[str, str] = MappingProxyType({})
SHOWN_CHARACTERS = 200
"""Of what a template says when it refuses a prompt."""


class PromptError(ValueError):
    """A prompt for which no response can ever be generated; the text has the reason, `cause` its category."""

    def __init__(self, reason: str, cause: Cause) -> None:
        super().__init__(reason)
        self.cause = cause


class ChatTokenizer:
    """The model folder's tokenizer (transformers AutoTokenizer) under the recipe's chat template.

    `chat_template`: null uses the tokenizer's own, `none` joins the messages' texts; any other value names a Jinja
    file: one of the run's `files` (`./NAME`), or one below an allowed root, which may be in a store.
    """

    def __init__(
        self,
        model_path: str,
        max_prompt_tokens: int,
        chat_template: str | None = None,
        files: Mapping[str, str] = NO_FILES,
    ) -> None:
        """Load the tokenizer from the folder, never from the network.

        Raises ValueError when the tokenizer, the chat template or the end-of-sequence token is missing or cannot be
        read; StoreError for a template that may not be read, or that its store does not have.
        """
        self._tokenizer: Any = _loaded(model_path)
        self._joins = chat_template == NO_TEMPLATE
        if chat_template is not None and not self._joins:
            self._tokenizer.chat_template = local_text(chat_template, "model.chat_template", files)
        if not self._joins and not self._tokenizer.chat_template:
            raise ValueError(
                f"model.chat_template: {shown(chat_template)} is not valid: "
                f"expected the path of a Jinja file, or {NO_TEMPLATE!r} to join the messages' texts; "
                f"the tokenizer in {model_path!r} has no template"
            )
        self._max_prompt_tokens = max_prompt_tokens
        self.stop_ids = stop_token_ids(Path(model_path), self._tokenizer.eos_token_id)

    def prompt_ids(self, prompt: Prompt) -> NDArray[np.int32]:
        """The prompt under the chat template with the assistant's turn opened: int32 [P].

        Raises PromptError when P exceeds the recipe's max_prompt_tokens (it is never truncated), or the template raises
        an error.
        """
        ids = np.asarray(self._encoded(prompt)["input_ids"], np.int32)
        if len(ids) > self._max_prompt_tokens:
            raise PromptError(
                f"length of prompt {prompt.id!r}: {len(ids)} tokens is not valid: expected at most "
                f"{self._max_prompt_tokens} (data.max_prompt_tokens, or model.max_model_len less the longest response)",
                Cause.TOO_LONG,
            )
        return ids

    def _encoded(self, prompt: Prompt) -> Any:
        from jinja2 import TemplateError

        if self._joins:
            return self._tokenizer("\n\n".join(message["content"] for message in prompt.messages))
        try:
            return self._tokenizer.apply_chat_template(
                list(prompt.messages), tokenize=True, add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            reason = f"prompt {prompt.id!r} was rejected by the chat template: {_refusal(error)}"
            raise PromptError(reason, Cause.REFUSED) from None  # a cause would show lines of the template

    def text(self, response_ids: Sequence[int] | NDArray[np.int32]) -> str:
        """The response as text, without special tokens."""
        return str(self._tokenizer.decode([int(token) for token in response_ids], skip_special_tokens=True))


def _loaded(model_path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - each tokenizer has errors of its own, which quote its files
        raise ValueError(
            f"model_path: {model_path!r} is not valid: expected a folder with a tokenizer that transformers can load "
            f"({type(error).__name__})"
        ) from None


def _refusal(error: TemplateError) -> str:
    """What a template says with raise_exception, else the kind of its fault and the line: none of its text."""
    from jinja2 import TemplateError, TemplateSyntaxError

    if type(error) is TemplateError:
        return str(error)[:SHOWN_CHARACTERS]
    line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
    return f"{type(error).__name__}{line}"


def stop_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Tokens that end a response: those of generation_config.json, else of config.json, and the tokenizer's own.

    Raises ValueError when there is none.
    """
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file() and (ids := _as_ids(json.loads(file.read_text()).get("eos_token_id"))):
            found.update(ids)
            break
    if not found:
        raise ValueError(f"model_path: {str(folder)!r} is not valid: expected a model with an eos_token_id")
    return tuple(sorted(found))


def _as_ids(value: int | list[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)
