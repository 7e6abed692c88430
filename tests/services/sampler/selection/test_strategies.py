"""The choice of the next prompt by each strategy: no prompt starves, and restarts change nothing."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts import Prompt
from services.sampler.data import PromptCursor, PromptsExhaustedError
from services.sampler.selection.posterior import PassRates
from services.sampler.selection.strategies import STRATEGIES, Place, Rule, Selection
from services.settings.algorithm import sampling

pytestmark = pytest.mark.conformance(
    formula="choice of the next prompt",
    setting="selection.strategy",
)

NOTHING: frozenset[str] = frozenset()


def prompts(count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(id=f"p{number}", messages=(), verifier="pattern", reference={}) for number in range(count))


def selection(count: int, seed: int = 0, place: Place = Place(), **rule: Any) -> Selection:  # noqa: B008
    return Selection(prompts(count), seed, PassRates(8.0), Rule(16, **rule), place)


def observe(chosen: Selection, prompt: str, correct: int, known: int = 1000) -> None:
    """Add so much evidence that a pass rate drawn from the posterior is almost exactly correct / known."""
    chosen.rates.observe(prompt, correct, known, 0)


def test_every_strategy_of_the_settings_has_its_rule() -> None:
    assert set(STRATEGIES) == set(get_args(sampling.SelectionSettings.model_fields["strategy"].annotation))
    assert [name for name, strategy in STRATEGIES.items() if strategy.screens] == ["screen"]


@pytest.mark.parametrize("strategy", ["uniform", "screen"])
def test_uniform_and_screen_draw_as_in_the_paper(strategy: str) -> None:
    chosen, walk = selection(7, seed=5), PromptCursor(prompts(7), seed=5)
    for number in range(3):
        observe(chosen, f"p{number}", 0)
    everything = {f"p{number}" for number in range(7)}
    assert [chosen.next(strategy, 0, everything) for _ in range(30)] == [walk.next() for _ in range(30)]
    assert chosen.place == Place(cursor=30)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropped_prompts_are_never_drawn(strategy: str) -> None:
    chosen = selection(6)
    assert chosen.drop("p2", "too-long")
    assert not chosen.drop("p2", "refused")
    assert not chosen.drop("elsewhere", "refused")
    drawn = {chosen.next(strategy, 0, NOTHING).id for _ in range(200)}
    assert drawn == {"p0", "p1", "p3", "p4", "p5"}
    for prompt in sorted(drawn):
        chosen.drop(prompt, "refused")
    with pytest.raises(PromptsExhaustedError, match="5 refused, 1 too-long"):
        chosen.next(strategy, 0, NOTHING)


def test_boundary_prefers_prompts_that_give_mixed_groups() -> None:
    chosen = selection(200)
    for number in range(200):
        observe(chosen, f"p{number}", {0: 500, 1: 1000}.get(number % 10, 0))  # a tenth mixed, a tenth always correct
    drawn = [int(chosen.next("boundary", 0, NOTHING).id[1:]) for _ in range(1000)]
    mixed = sum(number % 10 == 0 for number in drawn)
    # A tenth of the draws explores; a tenth of those draws such a prompt.
    assert mixed == pytest.approx(900 + 10, abs=10)


def test_boundary_prefers_unjudged_prompts_to_hopeless_ones() -> None:
    chosen = selection(200, exploration=0.001)
    for number in range(100):
        observe(chosen, f"p{number}", 0)
    assert all(int(chosen.next("boundary", 0, NOTHING).id[1:]) >= 100 for _ in range(70))


def test_each_draw_samples_the_posterior_independently() -> None:
    """A group of 16 has at least 0.9 of the highest chance to be mixed for pass rates from 0.1340 to 0.8660."""
    chosen, examined = selection(5000, exploration=0.001), []
    for _ in range(900):
        before = chosen.place.scan
        chosen.next("boundary", 0, NOTHING)
        examined.append(chosen.place.scan - before)
    share = 0.732
    assert examined.count(1) / 900 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 900))


def test_prompts_inside_the_band_are_drawn_equally_often() -> None:
    """Pass rates of 0.2, 0.5 and 0.8: a group of 16 is mixed in at least 97 of 100 cases."""
    chosen = selection(30, exploration=0.001)
    for number in range(30):
        observe(chosen, f"p{number}", (200, 500, 800)[number % 3])
    drawn = Counter(chosen.next("boundary", 0, NOTHING).id for _ in range(300))
    assert set(drawn.values()) == {10}


def test_the_best_candidate_is_drawn_if_none_is_in_the_band() -> None:
    chosen = selection(10, exploration=0.001, candidates=10)
    for number in range(10):
        observe(chosen, f"p{number}", 60 if number == 4 else 0)
    assert [chosen.next("boundary", 0, NOTHING).id for _ in range(20)] == ["p4"] * 20


def test_evidence_of_an_old_policy_is_forgotten() -> None:
    chosen = selection(50, exploration=0.001, candidates=1)
    for number in range(50):
        observe(chosen, f"p{number}", 0)
    copies = {step: selection(50, exploration=0.001) for step in (0, 400)}
    for step, later in copies.items():
        later.rates.load(chosen.rates.dump(), 0)
        for _ in range(20):
            later.next("boundary", step, NOTHING)
    assert copies[0].place.scan == 20 * 64, "no prompt is in the band, so each draw examines all its candidates"
    assert copies[400].place.scan < 60, "three of four prompts are in the band"


@given(count=st.integers(1, 30), candidates=st.integers(1, 20), seed=st.integers(0, 9))
def test_a_draw_is_bounded_and_an_epoch_draws_no_prompt_twice(count: int, candidates: int, seed: int) -> None:
    chosen = selection(count, seed, exploration=0.0001, candidates=candidates)
    for number in range(0, count, 2):
        observe(chosen, f"p{number}", 0)
    epochs: dict[int, Counter[str]] = {}
    for _ in range(100):
        before = chosen.place.scan
        prompt = chosen.next("boundary", 0, NOTHING).id
        assert 1 <= chosen.place.scan - before <= candidates
        if before // count == (chosen.place.scan - 1) // count:
            epochs.setdefault(before // count, Counter())[prompt] += 1
    assert all(times == 1 for drawn in epochs.values() for times in drawn.values())


@given(exploration=st.floats(0.01, 1), start=st.integers(0, 10**9), length=st.integers(1, 400))
def test_any_draws_in_a_row_contain_their_share_of_exploration(exploration: float, start: int, length: int) -> None:
    rule = Rule(16, exploration)
    explored = sum(rule.explores(draw) for draw in range(start, start + length))
    assert math.floor(length * exploration) <= explored <= math.ceil(length * exploration)


def test_exploring_draws_continue_the_uniform_walk() -> None:
    chosen, walk = selection(20, exploration=0.25), PromptCursor(prompts(20), seed=0)
    for number in range(20):
        observe(chosen, f"p{number}", 500 if number == 7 else 0)
    drawn = [chosen.next("boundary", 0, NOTHING).id for _ in range(400)]
    explored = [prompt for draw, prompt in enumerate(drawn) if chosen.rule.explores(draw)]
    assert explored == [walk.next().id for _ in range(100)]
    assert chosen.place.cursor == 100


@given(
    count=st.integers(2, 12),
    exploration=st.sampled_from([0.05, 0.1, 0.3, 1.0]),
    in_flight=st.integers(0, 8),
    hopeful=st.sets(st.integers(0, 11)),
    seed=st.integers(0, 99),
)
def test_no_prompt_starves(count: int, exploration: float, in_flight: int, hopeful: set[int], seed: int) -> None:
    """The uniform walk draws each prompt again within two epochs, and skips a prompt only while it is in flight."""
    chosen = selection(count, seed, exploration=exploration, candidates=4)
    for number in range(count):
        observe(chosen, f"p{number}", 500 if number in hopeful else 0)
    bound = in_flight + math.ceil((2 * count - 1) / exploration) + 1
    last = dict.fromkeys((prompt.id for prompt in prompts(count)), 0)
    waiting: deque[str] = deque(maxlen=in_flight)
    for draw in range(1, 2 * bound + 1):
        prompt = chosen.next("boundary", 0, set(waiting)).id
        waiting.append(prompt)
        last[prompt] = draw
        assert draw - min(last.values()) <= bound, f"{min(last, key=last.__getitem__)} waits"


@given(count=st.integers(1, 10), in_flight=st.sets(st.integers(0, 9)), seed=st.integers(0, 99))
def test_boundary_skips_prompts_in_flight_unless_all_are(count: int, in_flight: set[int], seed: int) -> None:
    chosen = selection(count, seed, exploration=0.3, candidates=3)
    waiting = {f"p{number}" for number in in_flight}
    everything = {prompt.id for prompt in prompts(count)}
    for _ in range(30):
        drawn = chosen.next("boundary", 0, waiting).id
        assert drawn not in waiting or everything <= waiting


STEPS = st.one_of(
    st.tuples(st.just("draw"), st.sampled_from(sorted(STRATEGIES))),
    st.tuples(st.just("judge"), st.integers(0, 16)),
    st.tuples(st.just("drop"), st.integers(1, 8)),  # one of the nine prompts is never dropped
    st.tuples(st.just("publish"), st.integers(1, 9)),
)


@given(steps=st.lists(STEPS, max_size=40), restarts=st.sets(st.integers(0, 39)), seed=st.integers(0, 9))
def test_a_restart_at_any_point_changes_nothing(steps: list[tuple[str, Any]], restarts: set[int], seed: int) -> None:
    """The state is the place, the pass rates and the dropped prompts."""

    def run(restarts: set[int]) -> list[str]:
        chosen = selection(9, seed, candidates=5)
        step, drawn, dropped = 0, [], []
        for number, (kind, value) in enumerate(steps):
            if number in restarts:
                successor = selection(9, seed, chosen.place, candidates=5)
                successor.rates.load(chosen.rates.dump(), step)
                for prompt in dropped:
                    successor.drop(prompt, "refused")
                chosen = successor
            if kind == "draw":
                drawn.append(chosen.next(value, step, set(drawn[-2:])).id)
            elif kind == "judge" and drawn:
                chosen.rates.observe(drawn[-1], value, 16, step)
            elif kind == "drop":
                dropped.append(f"p{value}")
                chosen.drop(f"p{value}", "refused")
            elif kind == "publish":
                step += value
        return [*drawn, *(chosen.next("boundary", step, NOTHING).id for _ in range(20))]

    assert run(restarts) == run(set())


def test_seeds_differ() -> None:
    assert len({selection(50, seed).next("boundary", 0, NOTHING).id for seed in range(20)}) > 5


@pytest.mark.parametrize("exploration", [0.0, 1.1, math.nan])
def test_a_setting_that_does_not_explore_is_rejected(exploration: float) -> None:
    with pytest.raises(ValueError, match="exploration\n"):
        sampling.SelectionSettings(exploration=exploration)
