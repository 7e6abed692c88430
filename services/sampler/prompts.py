"""Owns where prompts come from: a table of sources, each split by question text, and the cursor over it.

Must not tokenise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.contracts import Prompt
from services.settings import Data


class DataError(ValueError):
    """A data source that cannot give the prompts the recipe asks for."""


@dataclass(frozen=True)
class Splits:
    """Training and held-out prompts; no question stands in both."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def _prompt(data: Data, number: int, question: str, verifier: str, reference: dict[str, Any]) -> Prompt:
    messages = [{"role": "user", "content": question + data.suffix}]
    if data.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return Prompt(id=f"p{number:06d}", messages=tuple(messages), verifier=verifier, reference=reference)


def _reasoning_gym(data: Data) -> list[Prompt]:
    import reasoning_gym  # heavy: only where it is used

    wanted = data.train + data.held_out
    try:
        entries = reasoning_gym.create_dataset(data.task, size=wanted * 50, seed=data.seed, **data.options)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"data.task {data.task!r} with options {data.options!r} is not accepted: {error}") from None
    found: dict[str, Prompt] = {}
    for entry in entries:
        question = entry["question"]
        if question not in found:
            reference = {"task": data.task, "entry": entry}
            found[question] = _prompt(data, len(found), question, "reasoning-gym", reference)
        if len(found) == wanted:
            break
    return list(found.values())


def _jsonl(data: Data) -> list[Prompt]:
    path = Path(str(data.path))
    found: dict[str, Prompt] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DataError(f"data.path {str(path)!r} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            question, verifier, reference = str(row["question"]), str(row["verifier"]), dict(row["reference"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"data.path {str(path)!r} line {number}: {error!r}; an object with question, verifier, reference is"
                " accepted"
            ) from None
        found.setdefault(question, _prompt(data, number, question, verifier, reference))
    return list(found.values())


SOURCES: dict[str, Callable[[Data], list[Prompt]]] = {"reasoning-gym": _reasoning_gym, "jsonl": _jsonl}


def load_splits(data: Data) -> Splits:
    """Both splits, shuffled by `data.seed`. Raises DataError when the source has too few distinct questions."""
    prompts = SOURCES[data.source](data)
    wanted = data.train + data.held_out
    if len(prompts) < wanted:
        raise DataError(
            f"data.train + data.held_out = {wanted} but the source has only {len(prompts)} distinct questions"
        )
    random.Random(data.seed).shuffle(prompts)
    return Splits(train=tuple(prompts[data.held_out : wanted]), held_out=tuple(prompts[: data.held_out]))


class PromptCursor:
    """Walks the training prompts for ever, each epoch in an order of its own; `position` is all its state."""

    def __init__(self, prompts: tuple[Prompt, ...], seed: int, position: int = 0) -> None:
        self._prompts = prompts
        self._seed = seed
        self._order = (-1, list(range(len(prompts))))
        self.position = position

    def next(self) -> Prompt:
        """The next prompt; the same position always gives the same one."""
        epoch, place = divmod(self.position, len(self._prompts))
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        self.position += 1
        return self._prompts[self._order[1][place]]
