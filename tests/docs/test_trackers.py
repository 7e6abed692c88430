"""The examples in docs/operations/trackers.md are valid sections of a recipe, and together show every setting."""

import re
from pathlib import Path

import yaml

from services.settings import parse_recipe
from services.settings.sections import TRACKER_MODULES
from tests.harness.small_run import recipe_document

PAGE = (Path(__file__).parents[2] / "docs" / "operations" / "trackers.md").read_text()


def test_each_tracker_has_an_example_with_all_its_settings():
    shown = [yaml.safe_load(block)["tracking"] for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
    assert [list(section) for section in shown] == [[name] for name in TRACKER_MODULES]
    for section in shown:
        assert parse_recipe(recipe_document("/model", tracking=section)).tracking.model_dump() == section


def test_each_extra_is_named():
    for name in TRACKER_MODULES:
        assert f"pip install 'penstock[{name}]'" in PAGE
