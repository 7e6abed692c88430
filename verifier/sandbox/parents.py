"""Owns the warm parents of a sandbox: one per built-in verifier, and one per function of the user's.

Must not judge.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.settings.rewards.confined import MOST_CONFINED
from services.settings.rewards.kinds import PythonReward
from services.settings.rewards.reward import Reward
from verifier.sandbox.process import JudgingProcess
from verifier.sandbox.warm_parent import Start, WarmParent, WarmParentError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def parent_key(reward: Reward) -> str:
    """What a warm parent is for: a built-in verifier, or one function of the user's."""
    return f"python:{reward.options.function}" if isinstance(reward.options, PythonReward) else reward.kind


class WarmParents:
    """All warm parents, started when they are first needed. Any thread may use it."""

    def __init__(self, files: Mapping[str, str], start_s: float, program: str) -> None:
        self._files, self._start_s, self._program = dict(files), start_s, program
        self._lock = threading.Lock()
        self._parents: dict[str, WarmParent] = {}
        self._closed = False
        # They die with the thread that started them.
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="warm-parents")

    def launch(self, reward: Reward) -> WarmParent:
        """The warm parent of a reward, which may still be loading. Raises WarmParentError."""
        key = parent_key(reward)
        with self._lock:
            if self._closed:
                raise WarmParentError("the sandbox is closed")
            if key not in self._parents:
                if len(self._parents) >= MOST_CONFINED:
                    raise WarmParentError(f"a run may have at most {MOST_CONFINED} different confined rewards")
                parent = WarmParent(key, self._setup(reward), self._program)
                self._launch(parent)
                self._parents[key] = parent
            return self._parents[key]

    def note_judgement(self, key: str) -> None:
        """Note that a process of the warm parent `key` has judged: deaths before it do not count any more."""
        self._parents[key].deaths = 0

    def ready(self, reward: Reward) -> Start:
        """Wait until its warm parent is confined. Raises WarmParentError, which names the reward."""
        return self._attempted(reward, lambda parent: parent.ready(self._start_s))

    def fork(self, reward: Reward) -> JudgingProcess:
        """A new judging process; a warm parent that has died is started again. Raises WarmParentError."""
        return self._attempted(reward, lambda parent: parent.fork(self._start_s))

    def _attempted(self, reward: Reward, attempt: Callable[[WarmParent], Result]) -> Result:
        parent = self.launch(reward)
        while True:  # at most MOST_DEATHS times, unless another thread's text is judged meanwhile
            life = parent.life
            try:
                return attempt(parent)
            except WarmParentError as error:
                with self._lock:
                    if parent.life == life:  # no other thread has started it again
                        if self._closed or not parent.restartable():
                            raise WarmParentError(f"{parent.name}: {error}") from None
                        log.warning("the warm parent of %s is started again: %s", parent.name, error)
                        self._launch(parent)

    def needs_own_process(self, reward: Reward, reference: Mapping[str, Any]) -> bool:
        """Whether a text must not share its process with another text. Raises WarmParentError."""
        self.ready(reward)
        return self.launch(reward).needs_own_process(reference)

    def stop(self) -> None:
        """Kill all of them, with all that they have forked, and start none again; waits for them end."""
        with self._lock:
            self._closed = True
            for parent in self._parents.values():
                parent.kill()

    def close(self) -> None:
        """Close their sockets, once no thread uses them any more."""
        for parent in self._parents.values():
            parent.close()
        self._keeper.shutdown(cancel_futures=True)

    def _launch(self, parent: WarmParent) -> None:
        try:
            self._keeper.submit(parent.restart).result()
        except OSError as error:
            raise WarmParentError(f"it cannot be started: {error}") from None

    def _setup(self, reward: Reward) -> dict[str, Any]:
        if isinstance(reward.options, PythonReward):
            return {"kind": reward.kind, "function": reward.options.function, "files": self._files}
        return {"kind": reward.kind, "function": "", "files": {}}
