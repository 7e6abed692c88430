"""The section `tracking` of a recipe: its forms, its faults, and trackers that the platform lacks."""

import pytest

from services.settings import RecipeError, check_trackers, parse_recipe
from services.settings.recipe import Recipe
from services.settings.sections import TRACKER_MODULES
from tests.harness.small_run import recipe_document


def parsed(tracking):
    return parse_recipe(recipe_document("/model", tracking=tracking))


@pytest.mark.parametrize("given", [["wandb", "mlflow"], {"wandb": {}, "mlflow": None}])
def test_trackers_are_a_list_or_a_mapping(given):
    recipe = parsed(given)
    assert sorted(recipe.tracking.named) == ["mlflow", "wandb"]
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    check_trackers(recipe)


def test_a_recipe_of_an_earlier_release_names_none():
    assert parse_recipe(recipe_document("/model")).tracking.named == {}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["comet"], "tracking: 'comet' is not valid: expected tensorboard or mlflow or wandb"),
        ({"tensorboard": {"folder": "../other"}}, "tracking.tensorboard.folder: '../other' is not valid"),
        ({"tensorboard": {"folder": "/etc"}}, "tracking.tensorboard.folder: '/etc' is not valid"),
        ({"mlflow": {"uri": "https://user:word@host"}}, "tracking.mlflow.uri: "),
        ({"mlflow": {"uri": "sqlite:////etc/passwd"}}, "tracking.mlflow.uri: "),
        ({"wandb": {"api_key": "x"}}, "tracking.wandb.api_key: 'x' is not valid: expected a known field"),
    ],
)
def test_each_fault_names_its_field(given, text):
    with pytest.raises(RecipeError) as raised:
        parsed(given)
    assert str(raised.value).startswith(text)


def test_a_tracker_that_the_platform_lacks_is_refused(monkeypatch):
    monkeypatch.setitem(TRACKER_MODULES, "wandb", "no_such_library")
    with pytest.raises(RecipeError, match=r"^tracking: 'wandb' is not valid: expected .*'penstock\[wandb\]'"):
        check_trackers(parsed(["wandb", "tensorboard"]))
