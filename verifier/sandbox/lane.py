"""Owns the judging of one lane: the texts that wait, who judges them, and what happens when one takes long.

Must not share a process with another lane, nor let a text that takes long stop others.

Each of its threads takes texts of one verifier and has them judged, one after another, in a process that judged texts
of the same verifier and lane before; a text that its scorer evaluates gets a process of its own. A text that takes
long (verifier.sandbox.deadline) keeps its process and gets a thread for itself (verifier.sandbox.background); the
others go on.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Sequence

from services.contracts import SandboxFault
from services.settings.rewards.kinds import PythonReward
from verifier.sandbox.background import Background, Foreground, SlowText
from verifier.sandbox.deadline import UsualTime
from verifier.sandbox.finding import Finding, PendingText, finding_of, no_judgement
from verifier.sandbox.idle import JudgingProcesses
from verifier.sandbox.parents import WarmParents, parent_key
from verifier.sandbox.process import JudgementTimeoutError, JudgingProcess, ProcessFailedError, Reply, request_of
from verifier.sandbox.warm_parent import WarmParentError

log = logging.getLogger(__name__)

JUDGED_TOGETHER = 16  # texts per turn of a thread: findings travel together, and a process is woken once
WALL_FACTOR = 10.0
"""The bound on the clock of a judgement, in its CPU seconds."""


class JudgingLane:
    """The judging processes of one lane: `processes` texts at once, each with `timeout_s` CPU seconds.

    `foreground`: shared with the other lane, so that texts that take long go after those of both.
    """

    def __init__(self, parents: WarmParents, foreground: Foreground, processes: int, timeout_s: float) -> None:
        self._parents, self._timeout_s = parents, timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[PendingText] = deque()
        self._processes = JudgingProcesses(parents, processes)
        self._slow: set[threading.Thread] = set()
        self._deferred: deque[PendingText] = deque()
        self._foreground, self._background = foreground, Background(foreground)
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
            self._deferred.clear()
            self._changed.notify_all()
        self._processes.stop()  # also ends the threads' waits

    def close(self) -> None:
        """End all threads and processes, after `stop` and the end of the warm parents: nothing waits for them then."""
        for thread in self._threads:
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._slow)
        self._processes.close()

    def _work(self) -> None:
        while texts := self._taken():
            try:
                with self._foreground.judging():
                    self._judge(texts)
            except Exception as error:
                log.exception("a judging thread failed")
                for text in texts:
                    text.found(_broken(error))

    def _taken(self) -> deque[PendingText]:
        """The next texts of one verifier, with the same need of a process; empty once the lane is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._has_room() or self._closed)
                if self._closed:
                    return deque()
                if self._has_room():
                    self._waiting.appendleft(self._deferred.popleft())
                taken = deque([self._waiting.popleft()])
                first, share = taken[0], max(1, len(self._waiting) // len(self._threads))
                while self._waiting and len(taken) < min(JUDGED_TOGETHER, share) and not first.retried:
                    if self._waiting[0].retried or parent_key(self._waiting[0].reward) != parent_key(first.reward):
                        break
                    taken.append(self._waiting.popleft())
                taken = deque(text for text in taken if not text.batch.cancelled)
                if taken:
                    return taken

    def _has_room(self) -> bool:
        """Whether a text that takes long waits for room among the others, and there is some."""
        return bool(self._deferred) and self._background.room

    def _judge(self, texts: deque[PendingText]) -> None:
        """Have texts judged in one process, as long as they may share it and none takes long."""
        process: JudgingProcess | None = None
        while texts:
            text = texts.popleft()
            try:
                apart = self._parents.needs_own_process(text.reward, text.candidate.reference)
                if process is None or apart:
                    self._processes.retire(process)
                    process = None
                    process = self._processes.of(text.reward, new=apart, forked=text.retried)
                going_on = self._judged(process, text, apart)
            except WarmParentError as error:
                text.found(no_judgement(f"no judging process: {error}", SandboxFault.DIED))
                continue
            except Exception as error:
                log.exception("a text was not judged")
                text.found(_broken(error))
                if process:
                    self._processes.discard(process)
                process = None
                continue
            if not going_on:
                self._put_back(texts)  # the process has failed, or keeps its text
                return
            if apart:
                self._processes.discard(process)
                process = None
        if process:
            self._processes.retire(process)
            self._processes.fork_spare(text.reward, 1)  # takes over when a text takes long

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
                self._processes.fork_spare(text.reward, len(self._threads))  # while this text is judged
            slow_s = self._usual[process.verifier].slow_s
            reply = process.quick_reply(slow_s)
            if reply is None and self._went_on_apart(process, text, apart, slow_s):
                return False
            text.found(self._settled(process, reply or process.reply(), apart))
            return True
        except ProcessFailedError as error:
            self._processes.discard(process)
            self._failed(text, error)
            return False

    def _settled(self, process: JudgingProcess, reply: Reply, apart: bool) -> Finding:
        """The finding, once the judgement has ended: only a text that its scorer evaluates can pretend that it has."""
        if apart:
            process.check_ended()
        self._usual[process.verifier].add(process.cpu_seconds)
        self._parents.note_judgement(process.verifier)
        return finding_of(reply)

    def _went_on_apart(self, process: JudgingProcess, text: PendingText, apart: bool, slow_s: float) -> bool:
        """Let a text that takes long go on beside the others, or start again when there is room; False if neither."""
        slow = self._background.enter(process, slow_s)
        if slow is None:
            return self._was_deferred(process, text)
        thread = threading.Thread(target=self._finish_slow, args=(slow, text, apart), daemon=True)
        with self._changed:
            self._slow.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads in this container
            log.warning("a text that takes long occupies a judging thread: %s", error)
            self._background.leave(slow)
            self._ended(thread)
            return False
        return True

    def _was_deferred(self, process: JudgingProcess, text: PendingText) -> bool:
        """Judge a text again from the start when there is room for one that takes long; False if it was before."""
        if text.deferred:
            return False
        text.deferred = True
        self._processes.discard(process)
        with self._changed:
            if not self._closed:
                self._deferred.append(text)
        return True

    def _finish_slow(self, slow: SlowText, text: PendingText, apart: bool) -> None:
        process = slow.process
        usable = False
        try:
            self._processes.fork_spare(text.reward, 1)
            text.found(self._settled(process, self._background.reply(slow), apart))
            usable = not apart
        except ProcessFailedError as error:
            self._failed(text, error)
        except Exception as error:
            log.exception("a text was not judged")
            text.found(_broken(error))
        finally:
            self._background.leave(slow)
            if usable:
                self._processes.retire(process)
            else:
                self._processes.discard(process)
            self._ended(threading.current_thread())

    def _ended(self, slow: threading.Thread) -> None:
        """Note that a text that took long has ended: there is room for another."""
        with self._changed:
            self._slow.discard(slow)
            self._changed.notify_all()

    def _failed(self, text: PendingText, error: ProcessFailedError) -> None:
        """A text whose process died is judged again, in one forked for it: an earlier text may have caused it.

        Or the kernel, for lack of memory. A text that hangs is not judged again.
        """
        if isinstance(error, JudgementTimeoutError):
            text.found(no_judgement(f"{_named(text)}no judgement {error}", SandboxFault.TIMEOUT))
        elif not text.retried:
            text.retried = True
            self._put_back(deque([text]))
        else:
            reason = f"{_named(text)}no judgement: the judging process failed: {error}"
            text.found(no_judgement(reason, SandboxFault.DIED))

    def _put_back(self, texts: deque[PendingText]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(texts))
            self._changed.notify_all()


def _named(text: PendingText) -> str:
    """What a reason starts with: the user's function."""
    options = text.reward.options
    return f"{options.function}: " if isinstance(options, PythonReward) else ""


def _options(text: PendingText) -> dict[str, object]:
    return text.reward.options.model_dump(mode="json") if text.reward.options else {}


def _broken(error: Exception) -> Finding:
    """For an exception that the sandbox did not foresee: a text without a finding would never be settled."""
    return no_judgement(f"the sandbox failed: {type(error).__name__}: {error}", SandboxFault.DIED)
