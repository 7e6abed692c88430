"""Owns the queue's waits as the heartbeat reports them: for verdicts, for the learner, for kept groups.

Must not wait itself.
"""

from __future__ import annotations

from services.sampler.queue.state import QueueState

VERDICTS, LEARNER, KEPT_GROUPS, VERSION = "verdicts", "learner", "kept-groups", "policy-version"
"""The names of the waits."""


class QueueWaits:
    """Reports what the queue waits for."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._awaited: dict[str, str] = {}

    def update(self) -> None:
        """Report the current waits. Each starts again when the awaited group or step changes."""
        state, waits, limits = self._state, self._state.context.waits, self._state.recipe.limits
        generating, batched = state.table.generating, state.table.batched
        missing = limits.groups_per_step - len(state.table.kept)
        group, step = state.table.oldest_generating, min(batched, default=0)
        starved_step = str(state.next_step) if generating and missing > 0 and not batched else ""
        awaited: dict[str, tuple[str, str]] = {
            VERDICTS: (group, f"{len(generating)} groups, the oldest {group}"),
            LEARNER: (str(step or ""), f"the learner to train rollout step {step}"),
            KEPT_GROUPS: (starved_step, f"{missing} more kept groups for rollout step {state.next_step}"),
        }
        for name, (what, text) in awaited.items():
            if what != self._awaited.get(name):
                waits.done(name)
                self._awaited[name] = what
            if what:
                waits.pending(name, text, limits.stall_timeout_s)

    def clear(self) -> None:
        """End all waits."""
        for name in (*self._awaited, VERSION):
            self._state.context.waits.done(name)
