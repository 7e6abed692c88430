"""Owns text <-> tokens: the chat template of the model's folder, its stop tokens, and decoding.

Must not talk to the engine, which sees token ids only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.contracts import Prompt


class PromptError(ValueError):
    """A prompt that no response can be drawn for; the text says why."""


class ChatTokenizer:
    """The model folder's tokenizer (transformers AutoTokenizer)."""

    def __init__(self, model_path: str, max_model_len: int) -> None:
        """Loads from the folder alone. Raises ValueError when it has no chat template or no end-of-sequence token."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if not self._tokenizer.chat_template:
            raise ValueError(f"model_path: the tokenizer in {model_path!r} has no chat template; one is required")
        self._max_model_len = max_model_len
        self.stop_ids = stop_token_ids(Path(model_path), self._tokenizer.eos_token_id)

    def prompt_ids(self, prompt: Prompt, max_new_tokens: int) -> NDArray[np.int32]:
        """The prompt under the chat template with the assistant's turn opened: int32 [P].

        Raises PromptError when P + max_new_tokens exceeds model.max_model_len, or the template refuses it.
        """
        from jinja2 import TemplateError

        try:
            encoded = self._tokenizer.apply_chat_template(
                list(prompt.messages), tokenize=True, add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            raise PromptError(f"prompt {prompt.id!r}: the chat template refuses it: {error}") from error
        ids = np.asarray(encoded["input_ids"], np.int32)
        longest = self._max_model_len - max_new_tokens
        if len(ids) > longest:
            raise PromptError(
                f"prompt {prompt.id!r} has {len(ids)} tokens; at most {longest} are accepted "
                f"(model.max_model_len = {self._max_model_len} less rollout.max_new_tokens = {max_new_tokens})"
            )
        return ids

    def text(self, response_ids: Sequence[int] | NDArray[np.int32]) -> str:
        """The response as text, without special tokens."""
        return str(self._tokenizer.decode([int(one) for one in response_ids], skip_special_tokens=True))


def stop_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Tokens that end a response: of generation_config.json, else of config.json; and the tokenizer's own.

    Raises ValueError when there is none.
    """
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file() and (ids := _as_ids(json.loads(file.read_text()).get("eos_token_id"))):
            found.update(ids)
            break
    if not found:
        raise ValueError(f"model_path: {str(folder)!r} names no eos_token_id; one is required to end responses")
    return tuple(sorted(found))


def _as_ids(value: int | list[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)
