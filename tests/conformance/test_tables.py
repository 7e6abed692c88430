"""The tables have exactly the entries that the settings accept, so no setting is without code, and no code unused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

import pytest

from learner.algorithm.clipping import CLIPPINGS
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.ratios import RATIOS
from learner.algorithm.reductions import REDUCTIONS
from services.sampler.advantage.advantages import ADVANTAGES
from services.sampler.advantage.filtering import FILTERS
from services.sampler.advantage.rewards import PUNISHMENTS, REWARDS
from services.settings import PRESETS, AlgorithmSettings, Recipe
from services.settings.algorithm.sampling import DynamicSamplingSettings
from services.settings.algorithm.section import OverlongSettings


def _literals(section: type, field: str) -> set[Any]:
    return set(get_args(get_type_hints(section)[field]))


@pytest.mark.conformance(formula="the code has an entry for every accepted value", setting="algorithm.*")
@pytest.mark.parametrize(
    ("section", "field", "table"),
    [
        (AlgorithmSettings, "reduction", REDUCTIONS),
        (AlgorithmSettings, "ratio", RATIOS),
        (AlgorithmSettings, "clipping", CLIPPINGS),
        (AlgorithmSettings, "correction", [*CORRECTIONS, "auto"]),  # the recipe replaces `auto` with one of the others
        (AlgorithmSettings, "advantage", ADVANTAGES),
        (AlgorithmSettings, "preset", PRESETS),
        (AlgorithmSettings, "reward", REWARDS),
        (OverlongSettings, "shape", PUNISHMENTS),
    ],
)
def test_a_table_has_the_values_its_setting_accepts(section: type, field: str, table: Iterable[str]) -> None:
    assert _literals(section, field) == set(table)


@pytest.mark.conformance(
    formula="the code has an entry for every accepted value", setting="algorithm.dynamic_sampling.filter"
)
def test_the_filter_in_force_is_an_entry_of_the_table() -> None:
    assert set(get_args(get_type_hints(AlgorithmSettings.filter.fget)["return"])) == set(FILTERS)  # type: ignore[attr-defined]
    accepted = get_type_hints(DynamicSamplingSettings)["filter"]
    assert {name for part in get_args(accepted) for name in get_args(part)} == set(FILTERS)


@pytest.mark.conformance(
    formula="the code has an entry for every accepted value", setting="algorithm.correction = auto"
)
def test_auto_becomes_an_entry_of_the_table() -> None:
    assert set(get_args(get_type_hints(Recipe.correction.fget)["return"])) == set(CORRECTIONS)  # type: ignore[attr-defined]
