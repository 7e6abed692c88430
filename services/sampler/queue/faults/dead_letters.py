"""Owns the watch on dead letters: a dead task or sample ends its group, and drops its prompt if that is at fault.

Must not write a dead letter.
"""

from __future__ import annotations

from services.contracts import Cause, Release
from services.sampler.queue.state import QueueState
from services.streams.delivery.consumer import faulty_prompt


class DeadLetterWatch:
    """Reads the dead letters that no rewind made obsolete. A letter has no effect on a group that has ended."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._after = state.letters_after
        self._reported: set[str] = set()

    async def release_groups(self) -> None:
        """Drop the prompts of new dead letters, and release their pending groups. The run continues."""
        state, event_log = self._state, self._state.context.event_log
        for entry, letter in await event_log.dead_letters(self._after):
            self._after = entry
            prompt = faulty_prompt(state.context.keys, letter)
            if prompt:
                state.dispatcher.drop({prompt: letter.cause.value})
                # A replica of an earlier release has written the letter only, which the next rewind makes obsolete.
                await state.context.redis.hsetnx(state.context.keys.dropped, prompt, letter.cause.value)
            if letter.cause is Cause.INVALID or letter.group not in state.table.generating:
                continue
            if not prompt:
                await event_log.write("group-dead", f"{letter.group}: {letter.reason}")
            elif prompt not in self._reported:  # it may have been drawn twice before its first letter
                await event_log.write(f"prompt-{letter.cause.value}", f"never drawn again: {letter.reason}")
                self._reported.add(prompt)
            await state.release(letter.group, Release.DEAD, letter.reason)
