"""Owns the watch on dead letters: a dead task or sample ends its group, and drops its prompt if that is at fault.

Must not write a dead letter.
"""

from __future__ import annotations

from services.contracts import Cause, Release
from services.sampler.queue.dispatch import PROMPT_FAULTS
from services.sampler.queue.state import QueueState


class DeadLetterWatch:
    """Reads the dead letters that no earlier sampler of the run acted on, nor a rewind made obsolete."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._after = state.letters_after

    async def release_groups(self) -> None:
        """Release the pending groups of new dead letters, and record the prompts to drop. The run continues."""
        state, event_log = self._state, self._state.context.event_log
        causes: dict[str, str] = {}
        letters = await event_log.dead_letters(self._after)
        for _, letter in letters:
            dropped = state.dispatcher.drop(letter)
            if dropped and letter.prompt:
                causes[letter.prompt] = letter.cause.value
            if letter.cause is Cause.INVALID or letter.group not in state.table.generating:
                continue
            if dropped:
                await event_log.write(f"prompt-{letter.cause.value}", f"never drawn again: {letter.reason}")
            elif letter.cause not in PROMPT_FAULTS:
                await event_log.write("group-dead", f"{letter.group}: {letter.reason}")
            await state.release(letter.group, Release.DEAD)
        if letters:
            self._after = letters[-1][0]
            await state.transitions.drop_prompts(causes, self._after)
