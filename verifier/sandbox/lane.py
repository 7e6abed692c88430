"""Owns the judging of one lane: its processes, the texts that wait for them, and what happens when a text takes long.

Must not share a process with another lane, nor let a text that takes long stop others.

Each of its threads takes texts of one verifier and has them judged, one after another, in a process that judged texts
of the same verifier and lane before; a text that its scorer evaluates gets a process of its own. A text that takes
long (verifier.sandbox.deadline) keeps its process, at a lower priority, and a thread for itself; the others go on.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Sequence

from services.contracts import SandboxFault
from services.settings.rewards.kinds import PythonReward
from services.settings.rewards.reward import Reward
from verifier.sandbox.deadline import UsualTime
from verifier.sandbox.finding import Finding, PendingText, finding_of, no_judgement
from verifier.sandbox.parents import WarmParents, parent_key
from verifier.sandbox.process import JudgementTimeoutError, JudgingProcess, ProcessFailedError, Reply, request_of
from verifier.sandbox.warm_parent import WarmParentError

log = logging.getLogger(__name__)

JUDGED_TOGETHER = 16  # texts per turn of a thread: findings travel together, and a process is woken once
MOST_SLOW = 32
"""How many texts that take long a lane may have beside its processes; with more, they occupy processes."""
WALL_FACTOR = 10.0
"""The bound on the clock of a judgement, in its CPU seconds."""
RENEWED_AFTER = 10_000  # judgements per process: limits what a leaking library can hold
KEPT_BYTES = 256 << 20
"""How much more memory than at its start a process may hold; one that holds more is replaced."""


class JudgingLane:
    """The judging processes of one lane: `processes` texts at once, each with `timeout_s` CPU seconds."""

    def __init__(self, parents: WarmParents, processes: int, timeout_s: float) -> None:
        self._parents, self._timeout_s = parents, timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[PendingText] = deque()
        self._idle: dict[str, list[JudgingProcess]] = {}
        self._running: set[JudgingProcess] = set()
        self._slow: list[JudgingProcess] = []
        self._usual: dict[str, UsualTime] = defaultdict(UsualTime)
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"judge-{n}", daemon=True) for n in range(processes)]
        for thread in self._threads:
            thread.start()

    def add(self, texts: Sequence[PendingText]) -> None:
        """Have texts judged, after those that wait already."""
        with self._changed:
            self._waiting.extend(texts)
            self._changed.notify_all()

    def stop(self) -> None:
        """Kill the processes that judge, and take no more texts; those that wait get no finding."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            for process in self._running:
                process.kill()  # also ends the threads' waits
            self._changed.notify_all()

    def close(self) -> None:
        """End all threads and processes, after `stop` and the end of the warm parents: nothing waits for them then."""
        for thread in self._threads:
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._slow)
        for process in [each for idle in self._idle.values() for each in idle]:
            process.close()
        self._idle.clear()

    def _work(self) -> None:
        while texts := self._taken():
            try:
                self._judge(texts)
            except Exception as error:
                log.exception("a judging thread failed")
                for text in texts:
                    text.found(_broken(error))

    def _taken(self) -> deque[PendingText]:
        """The next texts of one verifier, with the same need of a process; empty once the lane is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return deque()
                taken = deque([self._waiting.popleft()])
                first, share = taken[0], max(1, len(self._waiting) // len(self._threads))
                while self._waiting and len(taken) < min(JUDGED_TOGETHER, share) and not first.fresh:
                    if self._waiting[0].fresh or parent_key(self._waiting[0].reward) != parent_key(first.reward):
                        break
                    taken.append(self._waiting.popleft())
                taken = deque(text for text in taken if not text.batch.cancelled)
                if taken:
                    return taken

    def _judge(self, texts: deque[PendingText]) -> None:
        """Have texts judged in one process, as long as they may share it and none takes long."""
        process: JudgingProcess | None = None
        while texts:
            text = texts.popleft()
            try:
                apart = self._parents.needs_own_process(text.reward, text.candidate.reference)
                if process is None or apart:
                    self._retire(process)
                    process = None
                    process = self._process(text.reward, new=apart or text.fresh)
                going_on = self._judged(process, text, apart)
            except WarmParentError as error:
                text.found(no_judgement(f"no judging process: {error}", SandboxFault.DIED))
                continue
            except Exception as error:
                log.exception("a text was not judged")
                text.found(_broken(error))
                if process:
                    self._discard(process)
                process = None
                continue
            if not going_on:
                self._put_back(texts)  # the process has failed, or keeps its text
                return
            if apart:
                self._discard(process)
                process = None
        if process:
            self._retire(process)
            self._fork_spare(text.reward, 1)  # takes over when a text takes long

    def _judged(self, process: JudgingProcess, text: PendingText, apart: bool) -> bool:
        """Have one text judged; False if the process has failed or keeps the text because it takes long."""
        try:
            request = request_of(text.reward.kind, _options(text), text.candidate)
        except (TypeError, ValueError, RecursionError) as error:  # the reference cannot be written as JSON
            text.found(no_judgement(f"{type(error).__name__}: {error}", SandboxFault.ERROR))
            return True
        try:
            process.ask(request, self._timeout_s, self._timeout_s * WALL_FACTOR)
            if apart:
                self._fork_spare(text.reward, len(self._threads))  # while this text is judged
            usual = self._usual[process.verifier]
            reply = process.quick_reply(usual.slow_s)
            usual.add(process.seconds)
            if reply is None and self._enter_background(process, text, apart):
                return False
            text.found(self._settled(process, reply or process.reply(), apart))
            return True
        except ProcessFailedError as error:
            self._failed(process, text, error, apart)
            return False

    def _settled(self, process: JudgingProcess, reply: Reply, apart: bool) -> Finding:
        """The finding, once the judgement has ended: only a text that its scorer evaluates can pretend that it has."""
        if apart:
            process.check_ended()
        self._parents.note_judgement(process.verifier)
        return finding_of(reply)

    def _enter_background(self, process: JudgingProcess, text: PendingText, apart: bool) -> bool:
        """Let a text that takes long go on beside the others; False if too many do."""
        thread = threading.Thread(target=self._finish_slow, args=(process, text, apart), daemon=True)
        with self._changed:
            if len(self._slow) >= MOST_SLOW or self._closed:
                return False
            try:
                thread.start()
            except RuntimeError as error:  # no more threads in this container
                log.warning("a text that takes long occupies a judging thread: %s", error)
                return False
            self._slow.append(process)
            for newer, each in enumerate(reversed(self._slow)):
                each.put_in_background(newer)
        return True

    def _finish_slow(self, process: JudgingProcess, text: PendingText, apart: bool) -> None:
        try:
            self._fork_spare(text.reward, 1)
            text.found(self._settled(process, process.reply(), apart))
        except ProcessFailedError as error:
            self._failed(process, text, error, apart)
        except Exception as error:
            log.exception("a text was not judged")
            text.found(_broken(error))
        finally:
            with self._changed:
                self._slow.remove(process)
                self._changed.notify_all()
            self._discard(process)

    def _failed(self, process: JudgingProcess, text: PendingText, error: ProcessFailedError, apart: bool) -> None:
        """A text whose process died is judged again where an earlier text may have caused it; one that hangs is not."""
        shared = process.judged > 1 and not apart
        self._discard(process)
        if isinstance(error, JudgementTimeoutError):
            text.found(no_judgement(f"{_named(text)}no judgement {error}", SandboxFault.TIMEOUT))
        elif shared and not text.retried:
            text.retried = text.fresh = True
            self._put_back(deque([text]))
        else:
            reason = f"{_named(text)}no judgement: the judging process failed: {error}"
            text.found(no_judgement(reason, SandboxFault.DIED))

    def _put_back(self, texts: deque[PendingText]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(texts))
            self._changed.notify_all()

    def _process(self, reward: Reward, new: bool) -> JudgingProcess:
        """A process of this verifier and lane. `new`: one that has judged no text. Raises WarmParentError."""
        process = self._woken(parent_key(reward), new) or self._parents.fork(reward)
        with self._changed:
            self._running.add(process)
            if self._closed:
                process.kill()
        return process

    def _woken(self, key: str, new: bool) -> JudgingProcess | None:
        """An idle process that runs again; those that have died with their warm parent are removed."""
        while True:
            with self._changed:
                idle = self._idle.setdefault(key, [])
                usable = [each for each in idle if not (new and each.judged)]
                process = max(usable, key=lambda each: each.judged, default=None)
                if process is None:
                    return None
                idle.remove(process)
            process.wake()
            if process.alive:
                return process
            process.close()

    def _fork_spare(self, reward: Reward, most: int) -> None:
        """Have a process ready for a text that needs a new one, unless `most` are."""
        with self._changed:
            idle = self._idle.setdefault(parent_key(reward), [])
            if self._closed or sum(not each.judged for each in idle) >= most:
                return
        try:
            spare = self._parents.fork(reward)
        except (WarmParentError, OSError) as error:
            if self._closed:
                return
            log.warning("a judging process could not be forked in advance: %s", error)
            return
        with self._changed:
            idle.append(spare)

    def _retire(self, process: JudgingProcess | None) -> None:
        """Keep a process for later texts of its verifier, unless it is used up."""
        if process is None:
            return
        if not process.alive or process.judged >= RENEWED_AFTER or process.kept_bytes() > KEPT_BYTES:
            self._discard(process)
            return
        process.suspend()
        with self._changed:
            self._running.discard(process)
            self._idle.setdefault(process.verifier, []).append(process)

    def _discard(self, process: JudgingProcess) -> None:
        with self._changed:
            self._running.discard(process)
        process.close()


def _named(text: PendingText) -> str:
    """What a reason starts with: the user's function."""
    options = text.reward.options
    return f"{options.function}: " if isinstance(options, PythonReward) else ""


def _options(text: PendingText) -> dict[str, object]:
    return text.reward.options.model_dump(mode="json") if text.reward.options else {}


def _broken(error: Exception) -> Finding:
    """For an exception that the sandbox did not foresee: a text without a finding would never be settled."""
    return no_judgement(f"the sandbox failed: {type(error).__name__}: {error}", SandboxFault.DIED)
