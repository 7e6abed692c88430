"""Owns the walk over the training prompts, and the set of dropped prompts.

Must not decide why a prompt is dropped.
"""

from __future__ import annotations

import random
from collections import Counter

from services.contracts import Prompt


class PromptsExhaustedError(RuntimeError):
    """Every training prompt was dropped; the text has the causes."""


class PromptCursor:
    """Walks the training prompts without end, reshuffled in each epoch, and skips the dropped ones.

    `position` is the only state to store: to restore a cursor, drop the same prompts again. Walks of different seeds
    are independent.
    """

    def __init__(self, prompts: tuple[Prompt, ...], seed: int | str, position: int = 0) -> None:
        self._prompts = prompts
        self._seed = seed
        self._order = (-1, list(range(len(prompts))))
        self._ids = {prompt.id for prompt in prompts}
        self._dropped: dict[str, str] = {}
        self.position = position

    def next(self) -> Prompt:
        """The next prompt that was not dropped. The same position and dropped prompts always give the same one.

        Raises PromptsExhaustedError if all were dropped.
        """
        if len(self._dropped) == len(self._prompts):
            causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.dropped.items()))
            raise PromptsExhaustedError(f"none of the {len(self._prompts)} training prompts can be used: {causes}")
        while (prompt := self._advance()).id in self._dropped:
            pass
        return prompt

    def _advance(self) -> Prompt:
        epoch, place = divmod(self.position, len(self._prompts))
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        self.position += 1
        return self._prompts[self._order[1][place]]

    def drop(self, prompt: str, cause: str) -> bool:
        """Never return prompt id `prompt` again. False if it was dropped before or is not a training prompt."""
        if prompt not in self._ids or prompt in self._dropped:
            return False
        self._dropped[prompt] = cause
        return True

    def __len__(self) -> int:
        """The number of prompts in an epoch, dropped ones included."""
        return len(self._prompts)

    @property
    def dropped(self) -> Counter[str]:
        """The number of dropped prompts, by cause."""
        return Counter(self._dropped.values())
