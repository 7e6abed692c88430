"""Tuning's decisions on signals that the test makes up."""

from dataclasses import replace

from services.controller.tuning.knobs import Bounds, Knob, Rules, Values
from services.controller.tuning.policy import RESTS, UNSTEADY, Policy
from services.controller.tuning.signals import StepSignals, StepWindow

COOL_DOWN = 3
RULES = Rules(
    idle_share=0.05,
    staleness=2.0,
    cool_down=COOL_DOWN,
    groups_per_step=8,
    group_size=4,
    max_sequences=64,
    bounds={Knob.INFLIGHT: Bounds(8, 128), Knob.STALENESS: Bounds(1, 4), Knob.REPLICAS: Bounds(1, 4)},
)
VALUES = Values(max_inflight_groups=24, max_staleness=1, replicas=2)


def signals(step=1, **changes):
    """A rollout step of 10 s; idle 0.3 unless told otherwise."""
    idle = changes.pop("idle", 0.3)
    made = StepSignals(
        step=step,
        wall_s=10.0,
        waiting_s=10.0 * idle,
        groups=8,
        tokens=8000.0,
        staleness=0.9,
        kept=8.0,
        filtered=8.0,
        stale=0.0,
        in_flight=16,
    )
    return replace(made, **changes)


class Run:
    """A run whose every step is the same until the test changes it."""

    def __init__(self, rules=RULES, values=VALUES, **changes):
        self.policy, self.values, self.step, self.changes = Policy(rules), values, 0, changes

    def steps(self, count, take=True):
        """Observe so many steps; the moves that were made."""
        moves = []
        for _ in range(count):
            self.step += 1
            if move := self.policy.observe(signals(self.step, **self.changes), self.values):
                moves.append(move)
                if take:
                    self.values = self.values.moved(move.knob, move.after)
                    self.policy.taken(move, self.step)
                else:
                    self.policy.reported(move, self.step)
        return moves

    def until_move(self, most=40):
        """The next move, and after how many steps."""
        for count in range(1, most + 1):
            if moves := self.steps(1):
                return moves[0], count
        return None, most


def first_move(values=VALUES, rules=RULES, **changes):
    move, _ = Run(rules, values, **changes).until_move()
    return (move.knob, move.before, move.after) if move else None


def test_an_idle_learner_gets_what_is_cheapest():
    binding = {"in_flight": 24}
    assert first_move(**binding) == (Knob.INFLIGHT, 24, 37), "the limit binds"
    assert first_move() == (Knob.STALENESS, 1, 2), "the slots bind"
    assert first_move(staleness=1.5) == (Knob.REPLICAS, 2, 4), "the staleness has no room"
    assert first_move(in_flight=42, values=replace(VALUES, max_inflight_groups=42))[0] is Knob.REPLICAS, "saturated"
    small = replace(VALUES, max_inflight_groups=16)
    assert first_move(values=small, in_flight=8) == (Knob.INFLIGHT, 16, 24), "the next bound needs as many"
    assert first_move(stale=4.0, **binding) == (Knob.STALENESS, 1, 2), "stale groups are what is lacking"
    assert first_move(idle=0.04) is None, "the target is held"


def test_no_bound_is_crossed():
    assert first_move(rules=replace(RULES, bounds={})) is None
    only = replace(RULES, bounds={Knob.REPLICAS: Bounds(1, 3)})
    assert first_move(rules=only, idle=0.9) == (Knob.REPLICAS, 2, 3)
    assert first_move(rules=only, values=replace(VALUES, replicas=3), idle=0.9) is None
    on_policy = replace(VALUES, max_staleness=0)
    bounds = {Knob.STALENESS: Bounds(1, 4)}
    assert first_move(rules=replace(RULES, bounds=bounds), values=on_policy, staleness=0.0) is None


def test_too_high_a_staleness_lowers_what_causes_it():
    high = {"staleness": 2.8, "idle": 0.0}
    values = Values(max_inflight_groups=96, max_staleness=3, replicas=2)
    assert first_move(values=values, in_flight=60, **high) == (Knob.INFLIGHT, 96, 47)
    assert first_move(values=values, in_flight=32, **high) == (Knob.STALENESS, 3, 2)
    assert first_move(values=replace(values, max_staleness=1), staleness=2.8, in_flight=16)[0] is not Knob.STALENESS
    move, _ = Run(values=values, in_flight=32, **high).until_move()
    assert move.text == "limits.max_staleness 3 -> 2: the mean staleness is 2.80 (target 2)"


def test_replicas_are_saved_only_after_long():
    run = Run(idle=0.0)
    move, after = run.until_move()
    assert (move.knob, move.after) == (Knob.REPLICAS, 1)
    assert after == 4 * COOL_DOWN
    run.changes["idle"] = 0.2
    back, _ = run.until_move()
    assert (back.knob, back.after) == (Knob.REPLICAS, 2)
    assert back.why.startswith("undone: ")
    run.changes["idle"] = 0.0
    assert run.steps(RESTS * COOL_DOWN - 10) == [], "it rests"


def test_a_move_that_makes_it_slower_is_undone():
    run = Run(in_flight=24)
    move, after = run.until_move()
    assert after == COOL_DOWN
    run.changes.update(kept=6.0, in_flight=37)
    back, after = run.until_move()
    assert (back.knob, back.before, back.after) == (move.knob, move.after, move.before)
    assert after == run.values.max_staleness + 1 + COOL_DOWN, "it settles, and then as many steps are measured"
    assert back.why == "undone: -25% trained tokens per second, the learner idled 30%"
    run.changes.update(kept=8.0, in_flight=24)
    others = run.steps(RESTS * COOL_DOWN - 10)
    assert not [other for other in others if other.knob is move.knob and other.up], "it rests"


def test_an_undoing_that_could_not_be_made_is_tried_again():
    run = Run(in_flight=24)
    run.until_move()
    run.changes.update(kept=6.0, in_flight=37)
    for _ in range(2):
        moves = []
        while not moves:
            run.step += 1
            moves = [move for move in [run.policy.observe(signals(run.step, **run.changes), run.values)] if move]
        assert (moves[0].knob, moves[0].after) == (Knob.INFLIGHT, 24)


def test_replicas_have_to_gain_something():
    run = Run(staleness=1.5)
    assert run.until_move()[0].knob is Knob.REPLICAS
    assert run.until_move()[0].why.startswith("undone: +0%")
    better = Run(staleness=1.5)
    better.until_move()
    better.changes["kept"] = 12.0
    assert better.until_move()[0] is None, "it has all replicas that it may have"
    assert better.values.replicas == 4


def test_a_knob_that_someone_else_moved_is_left_alone():
    run = Run(in_flight=24)
    run.steps(COOL_DOWN - 1)
    run.values = replace(run.values, max_inflight_groups=20)
    run.changes["in_flight"] = 20
    moves = run.steps(2 * COOL_DOWN)
    assert Knob.INFLIGHT not in {move.knob for move in moves}
    later = run.steps(6 * COOL_DOWN)
    assert Knob.INFLIGHT in {move.knob for move in later}


def test_what_is_only_told_is_not_told_again_soon():
    run = Run(in_flight=24)
    told = run.steps(RESTS * COOL_DOWN, take=False)
    assert [move.knob for move in told] == [Knob.INFLIGHT, Knob.STALENESS, Knob.REPLICAS]
    assert run.values == VALUES


def test_steps_that_something_else_explains_are_not_measured():
    run = Run(steady=False)
    assert run.steps(UNSTEADY * COOL_DOWN) == []
    assert run.until_move()[1] == COOL_DOWN, "replicas that never come do not end tuning"
    fresh = Run()
    fresh.steps(COOL_DOWN - 1)
    fresh.policy.interrupted()
    assert fresh.until_move()[1] == COOL_DOWN


def test_a_window_sums_up_its_steps():
    window = StepWindow((signals(idle=0.2, kept=6.0, stale=2.0), signals(idle=0.4, filtered=12.0)))
    assert window.idle_share == 0.3
    assert window.throughput == 12 * 1000 / 20
    assert window.stale_share == 2 / 18
    assert StepWindow((signals(),)).error == 0
    assert window.error > 0
