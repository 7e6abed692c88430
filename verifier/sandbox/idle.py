"""Owns the judging processes of one lane: which wait for a text, which are kept, which end.

Must not send a text.
"""

from __future__ import annotations

import logging
import threading

from services.settings.rewards.reward import Reward
from verifier.sandbox.parents import WarmParents, parent_key
from verifier.sandbox.process import JudgingProcess
from verifier.sandbox.warm_parent import WarmParentError

log = logging.getLogger(__name__)

RENEWED_AFTER = 10_000  # judgements per process: limits what a leaking library can hold
KEPT_BYTES = 256 << 20
"""How much more memory than at its start a process may hold; one that holds more is replaced."""


class JudgingProcesses:
    """A lane's judging processes; at most `kept` idle ones per verifier have judged texts. Any thread may use it."""

    def __init__(self, parents: WarmParents, kept: int) -> None:
        self._parents, self._kept = parents, kept
        self._lock = threading.Lock()
        self._idle: dict[str, list[JudgingProcess]] = {}
        self._running: set[JudgingProcess] = set()
        self._closed = False

    def of(self, reward: Reward, new: bool, forked: bool) -> JudgingProcess:
        """A process of this verifier and lane. `new`: one that has judged no text; `forked`: none that waits already.

        Raises WarmParentError.
        """
        process = (None if forked else self._woken(parent_key(reward), new)) or self._parents.fork(reward)
        with self._lock:
            self._running.add(process)
            if self._closed:
                process.kill()
        return process

    def fork_spare(self, reward: Reward, most: int) -> None:
        """Have a process ready for a text that needs a new one, unless `most` are."""
        with self._lock:
            idle = self._idle.setdefault(parent_key(reward), [])
            if self._closed or sum(not each.judged for each in idle) >= most:
                return
        try:
            spare = self._parents.fork(reward)
        except (WarmParentError, OSError) as error:
            if not self._closed:
                log.warning("a judging process could not be forked in advance: %s", error)
            return
        with self._lock:
            idle.append(spare)

    def retire(self, process: JudgingProcess | None) -> None:
        """Keep a process for later texts of its verifier, unless it is used up."""
        if process is None:
            return
        if not process.alive or process.judged >= RENEWED_AFTER or process.kept_bytes() > KEPT_BYTES:
            self.discard(process)
            return
        process.suspend()
        with self._lock:
            self._running.discard(process)
            idle = self._idle.setdefault(process.verifier, [])
            kept = sum(each.judged > 0 for each in idle) < self._kept
            if kept:
                idle.append(process)
        if not kept:
            process.close()

    def discard(self, process: JudgingProcess) -> None:
        """End a process."""
        with self._lock:
            self._running.discard(process)
        process.close()

    def stop(self) -> None:
        """Kill those that judge, and let no other judge."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def close(self) -> None:
        """End all, once no thread uses them."""
        for process in [each for idle in self._idle.values() for each in idle]:
            process.close()
        self._idle.clear()

    def _woken(self, key: str, new: bool) -> JudgingProcess | None:
        """An idle process that runs again; those that have died with their warm parent are removed."""
        while True:
            with self._lock:
                idle = self._idle.setdefault(key, [])
                usable = [each for each in idle if not (new and each.judged)]
                process = max(usable, key=lambda each: each.judged, default=None)
                if process is None:
                    return None
                idle.remove(process)
            process.wake()
            if process.alive and process.silent:
                return process
            process.close()
