"""Texts that take long run after others, those that have used the least CPU time first, and all of them in the end."""

import threading

from verifier.sandbox.background import MOST_SLOW, REST_S, TURN_S, Background, Foreground
from verifier.sandbox.deadline import LEAST_SLOW_S, MOST_SLOW_S, SLOW_FACTOR, UsualTime
from verifier.sandbox.process import Reply

SLOW_S = 0.01
ANSWER = Reply(to="x", correct=True)


class Counted:
    """A judging process that answers after `needs_s` of CPU time, which its own waits give it."""

    def __init__(self, used_s, needs_s=float("inf")):
        self.cpu_seconds, self.needs_s = used_s, needs_s
        self.stopped, self.waits = False, []

    def suspend(self):
        self.stopped = True

    def wake(self):
        self.stopped = False

    def reply_within(self, pause_s):
        self.waits.append((self.stopped, pause_s))
        self.cpu_seconds += 0.0 if self.stopped else pause_s
        return ANSWER if self.cpu_seconds >= self.needs_s or len(self.waits) > 50 else None


def waits(background, process):
    slow = background.enter(process, SLOW_S)
    assert process.stopped, "until its reply is waited for"
    assert background.reply(slow) == ANSWER
    background.leave(slow)
    assert not process.stopped
    return process.waits


def test_alone_it_runs_to_its_end():
    found = waits(Background(Foreground(1)), Counted(SLOW_S, 0.5))
    assert not any(stopped for stopped, _ in found)
    assert sum(pause_s for _, pause_s in found) < 0.6


def test_while_others_need_all_processes_it_gets_turns():
    foreground = Foreground(1)
    with foreground.judging():
        found = waits(Background(foreground), Counted(4 * SLOW_S, 4 * SLOW_S + 5 * TURN_S))
    assert found == [(False, TURN_S), (True, REST_S)] * 4 + [(False, TURN_S)]


def test_at_first_it_runs_though_others_need_all():
    """Most texts that take long only take somewhat longer than usual."""
    foreground = Foreground(1)
    with foreground.judging():
        found = waits(Background(foreground), Counted(SLOW_S, 1.5 * SLOW_S))
    assert found == [(False, SLOW_S)]


def test_the_one_with_the_least_cpu_time_runs():
    background = Background(Foreground(1))
    older = background.enter(Counted(100 * SLOW_S), SLOW_S)
    newer = background.enter(Counted(4 * SLOW_S, 8 * SLOW_S), SLOW_S)
    waiting = threading.Thread(target=background.reply, args=(older,))
    waiting.start()
    assert background.reply(newer) == ANSWER
    assert not any(stopped for stopped, _ in newer.process.waits)
    assert all(stopped for stopped, _ in older.process.waits), "from its first turn"
    older.process.needs_s = 0.0
    background.leave(newer)
    waiting.join(30)
    assert not waiting.is_alive()


def test_there_is_room_for_so_many():
    background = Background(Foreground(1))
    texts = [background.enter(Counted(SLOW_S), SLOW_S) for _ in range(MOST_SLOW)]
    assert None not in texts
    assert background.enter(Counted(SLOW_S), SLOW_S) is None
    background.leave(texts[0])
    assert background.enter(Counted(SLOW_S), SLOW_S) is not None


def test_from_when_on_a_text_takes_long():
    usual = UsualTime()
    assert usual.slow_s == LEAST_SLOW_S
    for _ in range(100):
        usual.add(0.01)
    assert abs(usual.slow_s - SLOW_FACTOR * 0.01) < 1e-9
    for _ in range(100):
        usual.add(10.0)
    assert usual.slow_s == MOST_SLOW_S
