"""The recipe's section `tuning`: its bounds, and the plan that they make necessary."""

import pytest

from services.settings import RecipeError, parse_recipe
from tests.harness.small_run import recipe_document

ON = {"mode": "on", "inflight_groups": [8, 64], "max_staleness": [1, 4], "replicas": [1, 3]}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"tuning": {"mode": "auto"}}, "tuning.mode: 'auto' is not valid: expected 'off', 'report' or 'on'"),
        ({"tuning": {"mode": "on"}}, "tuning.mode: 'on' is not valid: expected off, or [least, most] for one of "),
        ({"tuning": {"replicas": [3, 1]}}, "tuning.replicas: [3, 1] is not valid: expected null, or [least, most]"),
        ({"tuning": {"replicas": [1]}}, "tuning.replicas: [1] is not valid: expected null, or [least, most]: two"),
        ({"tuning": {"max_staleness": [0, 2]}}, "tuning.max_staleness: [0, 2] is not valid: expected null, or"),
        ({"tuning": {"inflight_groups": "1-9"}}, "tuning.inflight_groups: '1-9' is not valid: expected null, or"),
        ({"tuning": {"inflight_groups": [1, True]}}, "tuning.inflight_groups: [1, True] is not valid: expected null"),
        ({"tuning": {"idle_share": 1}}, "tuning.idle_share: 1 is not valid: expected a number less than 1"),
        ({"tuning": {"cool_down_steps": 0}}, "tuning.cool_down_steps: 0 is not valid: expected a number greater"),
        (
            {"tuning": ON, "limits": {"max_inflight_groups": 65}},
            "limits.max_inflight_groups: 65 is not valid: expected 8 to 64, the bounds of tuning.inflight_groups, or "
            "tuning.mode = 'off'",
        ),
        ({"tuning": ON, "rollout": {"replicas": 4}}, "rollout.replicas: 4 is not valid: expected 1 to 3, the bounds"),
        ({"tuning": ON, "limits": {"max_staleness": 0}}, "limits.max_staleness: 0 is not valid: expected 1 to 4, the"),
    ],
)
def test_a_fault_names_field_value_and_bounds(sections, expected):
    with pytest.raises(RecipeError) as error:
        parse_recipe(recipe_document("/model", **sections))
    assert str(error.value).startswith(expected)


def test_plans_hold_what_tuning_may_reach():
    recipe = parse_recipe(recipe_document("/model", tuning=ON))
    assert (recipe.at_most.limits.max_inflight_groups, recipe.at_most.limits.max_staleness) == (64, 4)
    assert (recipe.most_replicas(1), recipe.most_replicas(5)) == (3, 5)
    told = parse_recipe(recipe_document("/model", tuning={**ON, "mode": "report"}))
    assert told.at_most is told
    assert told.most_replicas(1) == 1


def test_modes_are_written_as_yaml_reads_them():
    for given, mode in ((True, "on"), (False, "off"), ("report", "report")):
        assert parse_recipe(recipe_document("/model", tuning={**ON, "mode": given})).tuning.mode == mode


def test_bounds_without_a_mode_bind_nothing():
    off = {**ON, "mode": "off"}
    assert parse_recipe(recipe_document("/model", tuning=off, limits={"max_inflight_groups": 99})).tuning.mode == "off"
