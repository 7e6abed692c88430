"""What the settings accept and what the tables hold are the same, so that no setting is without code or the reverse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

import pytest

from learner.algorithm.clipping import CLIPPINGS
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.reductions import REDUCTIONS
from services.sampler.advantage.advantages import ADVANTAGES
from services.sampler.advantage.rewards import PUNISHMENTS
from services.settings import PRESETS, AlgorithmSettings, Recipe
from services.settings.sections import OverlongSettings


def _literals(section: type, field: str) -> set[Any]:
    return set(get_args(get_type_hints(section)[field]))


@pytest.mark.conformance(formula="every table entry has a setting", setting="algorithm.*")
@pytest.mark.parametrize(
    ("section", "field", "table"),
    [
        (AlgorithmSettings, "reduction", REDUCTIONS),
        (AlgorithmSettings, "clipping", CLIPPINGS),
        (AlgorithmSettings, "correction", [*CORRECTIONS, "auto"]),  # which the recipe resolves into one of the others
        (AlgorithmSettings, "advantage", ADVANTAGES),
        (AlgorithmSettings, "preset", PRESETS),
        (OverlongSettings, "shape", PUNISHMENTS),
    ],
)
def test_the_table_offers_what_the_setting_accepts(section: type, field: str, table: Iterable[str]) -> None:
    assert _literals(section, field) == set(table)


@pytest.mark.conformance(formula="every table entry has a setting", setting="algorithm.correction = auto")
def test_what_auto_becomes_is_in_the_table() -> None:
    assert set(get_args(get_type_hints(Recipe.correction.fget)["return"])) == set(CORRECTIONS)  # type: ignore[attr-defined]
