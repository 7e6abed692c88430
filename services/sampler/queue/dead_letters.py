"""Owns the watch on dead letters: a dead task or sample ends its group, and drops its prompt if that is at fault.

Must not write a dead letter.
"""

from __future__ import annotations

from services.contracts import Cause, Release
from services.sampler.queue.dispatch import PROMPT_FAULTS
from services.sampler.queue.state import QueueState
from services.streams.keys import order_of


class DeadLetterWatch:
    """Reads all dead letters of a run from the first one, so that the dropped prompts are known before any is drawn."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._after = "0-0"

    async def release_groups(self) -> None:
        """Release the pending groups of new dead letters. The run continues."""
        state, event_log = self._state, self._state.context.event_log
        for entry, letter in await event_log.dead_letters(self._after):
            self._after = entry
            dropped = state.dispatcher.drop(letter)
            # A rewind reopened the groups of all earlier letters.
            if letter.cause is Cause.INVALID or order_of(entry) <= state.rewound_at or not letter.group:
                continue
            if letter.group not in state.table.generating:
                continue
            if dropped:
                await event_log.write(f"prompt-{letter.cause.value}", f"never drawn again: {letter.reason}")
            elif letter.cause not in PROMPT_FAULTS:
                await event_log.write("group-dead", f"{letter.group}: {letter.reason}")
            await state.release(letter.group, Release.DEAD)
