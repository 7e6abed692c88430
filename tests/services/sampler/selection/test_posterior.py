"""The estimate of a pass rate: exact for the policy of the same rollout step, then fading, stored without rounding."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sampler.selection.posterior import EVIDENCE, FLAT, Beta, PassRates, mixed
from services.settings.algorithm.sampling import SelectionSettings

pytestmark = pytest.mark.conformance(
    formula="Beta posterior of a pass rate, evidence halved every half_life rollout steps (MoPPS, arXiv 2507.04632)",
    setting="selection.half_life",
)

STEPS = st.integers(0, 1000)


@st.composite
def observations(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """(prompt, correct, known, step), steps in any order."""
    drawn = []
    for _ in range(draw(st.integers(0, 12))):
        known = draw(st.integers(0, 16))
        drawn.append((draw(st.sampled_from("abc")), draw(st.integers(0, known)), known, draw(STEPS)))
    return drawn


def rates(observed: list[tuple[str, int, int, int]], half_life: float = 8.0, prior: Beta = FLAT) -> PassRates:
    pass_rates = PassRates(half_life, prior)
    for observation in observed:
        pass_rates.observe(*observation)
    return pass_rates


def test_an_unseen_prompt_has_the_prior() -> None:
    assert PassRates(8.0).of("a", 5) == (1.0, 1.0)
    assert PassRates(8.0, Beta(2.0, 3.0)).of("a", 5).mean == 0.4


def test_fresh_evidence_counts_in_full_and_halves_in_a_half_life() -> None:
    known = rates([("a", 12, 16, 10)])
    assert known.of("a", 10) == (13.0, 5.0)
    assert known.of("a", 18) == (7.0, 3.0)
    assert known.of("a", 26) == (4.0, 2.0)
    known.observe("a", 0, 4, 18)
    assert known.of("a", 18) == (7.0, 7.0)
    # The evidence of a group that was in flight for long has faded already.
    known.observe("a", 8, 8, 10)
    assert known.of("a", 18) == (11.0, 7.0)


@given(observed=observations(), prior=st.builds(Beta, st.floats(0.1, 10), st.floats(0.1, 10)))
def test_all_evidence_fades_to_the_prior(observed: list[tuple[str, int, int, int]], prior: Beta) -> None:
    known = rates(observed, 8.0, prior)
    for prompt in "abc":
        distances = []
        for later in (0, 1, 8, 80):
            alpha, beta = known.of(prompt, 1000 + later)
            assert alpha >= prior.alpha
            assert beta >= prior.beta
            distances.append(alpha - prior.alpha + beta - prior.beta)
        assert distances == sorted(distances, reverse=True)
        assert known.of(prompt, 10_000) == pytest.approx(prior, abs=1e-9)


@given(observed=observations(), order=st.randoms(use_true_random=False))
def test_the_order_of_observations_does_not_matter(
    observed: list[tuple[str, int, int, int]], order: random.Random
) -> None:
    shuffled = list(observed)
    order.shuffle(shuffled)
    for prompt in "abc":
        assert rates(shuffled).of(prompt, 1000) == pytest.approx(rates(observed).of(prompt, 1000), rel=1e-4)


@given(correct=st.integers(0, 16), first=st.integers(0, 16), step=STEPS)
def test_a_group_observed_in_parts_gives_the_same_posterior(correct: int, first: int, step: int) -> None:
    """A screen of `first` samples, then the rest."""
    early = min(first, correct)
    parts = rates([("a", early, first, step), ("a", correct - early, max(16 - first, correct - early), step)])
    known = first + max(16 - first, correct - early)
    assert parts.of("a", step) == (1.0 + correct, 1.0 + known - correct)


@given(observed=observations())
def test_dump_and_load_are_exact_and_hold_judged_prompts_only(observed: list[tuple[str, int, int, int]]) -> None:
    before = rates(observed)
    dumped = before.dump()
    after = PassRates(8.0)
    after.observe("z", 1, 2, 3)
    after.load(dumped, 1000)
    assert set(dumped) == {prompt for prompt, _, known, _ in observed if known}
    assert len(after) == len(dumped)
    assert after.dump() == dumped
    assert all(len(text) == 16 and text == before.entry(prompt) for prompt, text in dumped.items())
    for prompt in "abc":
        assert after.of(prompt, 1003) == before.of(prompt, 1003)
        before.observe(prompt, 3, 7, 1004)
        after.observe(prompt, 3, 7, 1004)
    assert after.dump() == before.dump()


def test_the_version_that_an_earlier_release_stored_is_limited() -> None:
    """It is at least the step of the evidence: a version of 70 may be one of step 4."""
    known = PassRates(8.0)
    known.load(rates([("a", 12, 16, 70), ("b", 12, 16, 3)]).dump(), 4)
    assert known.of("a", 12) == (7.0, 3.0)
    assert known.of("b", 11) == (7.0, 3.0)
    known.observe("a", 0, 4, 4)
    assert known.of("a", 4) == (13.0, 9.0), "what is observed next counts in full"


def test_a_prompt_takes_twelve_bytes() -> None:
    assert EVIDENCE.size == 12


@pytest.mark.parametrize(
    "text", ["", "AAAA", "not base64, is it", "AACAvwAAAAAAAAAA", "AADAfwAAAAAAAAAA", "AACAfwAAAAAAAAAA"]
)
def test_load_rejects_what_dump_cannot_write(text: str) -> None:
    """The last three: -1, NaN and infinitely many correct answers."""
    with pytest.raises(ValueError, match="prompt 'a'"):
        PassRates(8.0).load({"a": text}, 0)


@pytest.mark.parametrize(("correct", "known"), [(-1, 3), (4, 3), (1, 0)])
def test_impossible_counts_are_rejected(correct: int, known: int) -> None:
    with pytest.raises(ValueError, match="prompt 'a': correct: "):
        PassRates(8.0).observe("a", correct, known, 0)


@pytest.mark.parametrize("half_life", [0.0, -1.0, math.nan])
def test_a_half_life_is_a_number_above_0(half_life: float) -> None:
    with pytest.raises(ValueError, match="half_life\n"):
        SelectionSettings(half_life=half_life)


def density(belief: Beta, rate: float) -> float:
    """The textbook formula of the density, without its constant."""
    return float(rate ** (belief.alpha - 1) * (1 - rate) ** (belief.beta - 1))


@pytest.mark.parametrize("belief", [FLAT, Beta(3.0, 2.0), Beta(1.0, 17.0), Beta(40.0, 7.5)])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_the_chance_of_a_mixed_group_integrates_over_the_rate(belief: Beta, size: int) -> None:
    """Compared with the midpoint rule for the integral of 1 - p^G - (1-p)^G."""
    at = [(place + 0.5) / 20_000 for place in range(20_000)]
    weights = [density(belief, rate) for rate in at]
    integral = sum(w * (1 - p**size - (1 - p) ** size) for p, w in zip(at, weights, strict=True)) / sum(weights)
    assert belief.mixed(size) == pytest.approx(integral, abs=1e-6)


def test_known_values() -> None:
    # A flat prior: all numbers of correct answers from 0 to G are equally likely.
    assert FLAT.mixed(16) == pytest.approx(15 / 17)
    assert mixed(0.5, 4) == pytest.approx(7 / 8)
    assert mixed(1e-12, 16) == pytest.approx(16e-12, rel=1e-9, abs=0)
    assert [mixed(rate, 8) for rate in (0.0, 1.0)] == [0.0, 0.0]
    assert mixed(0.3, 1) == pytest.approx(0.0)


@given(rate=st.floats(0, 1), size=st.integers(1, 64))
def test_mixed_is_a_probability_symmetric_in_the_rate(rate: float, size: int) -> None:
    assert 0 <= mixed(rate, size) <= 1
    assert mixed(rate, size) == pytest.approx(mixed(1 - rate, size), abs=1e-9)
    assert mixed(rate, size) <= mixed(rate, size + 1) + 1e-12


def test_rates_drawn_from_a_belief_have_its_mean() -> None:
    rng = random.Random(1)
    drawn = [Beta(3.0, 1.0).draw(rng) for _ in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 5 / 4000))
