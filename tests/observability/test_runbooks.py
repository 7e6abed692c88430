"""Runbooks: one page per alert, and everything that a page names exists."""

import json
import re
from functools import cache

import promql_parser
from pydantic import BaseModel

from services.settings import Recipe
from tests.harness.documented_commands import check_penstock, console_commands, inline_commands
from tests.harness.each import each
from tests.observability.external import EXTERNAL
from tests.observability.reading import (
    ROOT,
    RUNBOOKS,
    alerts,
    dashboards,
    exported,
    metrics_of,
    panels,
    recorded,
)

SECTIONS = ["What it means", "How to see it", "What to do"]
OTHER_PROGRAMS = {"helm", "kubectl", "curl", "redis-cli", "grep"}
PAGES = sorted(RUNBOOKS.rglob("*.md"))
LINK = re.compile(r"(?<![/\w`])([A-Z][a-z]+(?:[A-Z][a-z]+)+)(?![\w/])")
OF_KUBERNETES = {"ErrImagePull", "ImagePullBackOff", "KubeRay", "NetworkPolicy", "RayCluster", "ReadWriteOnce"}


def test_every_alert_has_a_page_and_every_page_an_alert():
    assert {page.stem for page in PAGES} == set(alerts())
    page = (ROOT / "docs" / "operations" / "observability.md").read_text()
    assert set(re.findall(r"\]\(runbooks/\w+/(\w+)\.md\)", page)) == set(alerts())


of_each_page = each("page", PAGES, called=lambda page: page.stem)


@of_each_page
def test_a_page_has_its_three_sections(page):
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS
    parts = re.split(r"^## .+$", text, flags=re.M)[1:]
    assert all(len(part.strip()) > 20 for part in parts)


@of_each_page
def test_a_page_names_its_rule_and_an_existing_panel(page):
    rule = alerts()[page.stem]
    found = re.search(r"^Severity (\w+); rule in `(.+)`; dashboard (.+), panel (.+)\.$", page.read_text(), re.M)
    assert found, "the line under the title"
    assert (found[1], found[2]) == (rule["labels"]["severity"], f"helm/penstock/files/rules/{rule['file']}")
    titles = {board["title"]: {panel["title"] for panel in panels(board)} for board in dashboards().values()}
    assert found[4] in titles[found[3]]


@of_each_page
def test_the_commands_of_a_page_exist(page):
    text = page.read_text()
    for words in [*console_commands(text), *inline_commands(text)]:
        if words[0] == "penstock":
            check_penstock(words)
        else:
            assert words[0] in OTHER_PROGRAMS, words


@of_each_page
def test_the_settings_of_a_page_exist(page):
    for path in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", page.read_text()):
        if path.split(".")[0] in Recipe.model_fields:
            check_setting(path)


@of_each_page
def test_queries_of_a_page_read_exported_metrics(page):
    for block in re.findall(r"```promql\n(.*?)```", page.read_text(), re.S):
        promql_parser.parse(block)
        assert metrics_of(block) <= exported() | recorded() | set(EXTERNAL)


@of_each_page
def test_other_alerts_that_a_page_names_exist(page):
    for name in LINK.findall(page.read_text()):
        assert name in alerts() or name in OF_KUBERNETES, name


@of_each_page
def test_the_panels_that_the_text_of_a_page_names_exist(page):
    """`Learner / Judged groups by result` in running text, whose end no mark shows."""
    titles = {
        board["title"].removeprefix("Penstock / "): [panel["title"] for panel in panels(board)]
        for board in dashboards().values()
    }
    text = " ".join(re.split(r"^Severity .+$", page.read_text(), flags=re.M)).replace("\n", " ")
    for board, rest in re.findall(rf"(?<!/ )\b({'|'.join(titles)}) / (.{{1,60}})", text):
        assert any(rest.startswith(title) for title in titles[board]), f"{board} / {rest}"


@of_each_page
def test_values_of_the_chart_that_a_page_names_exist(page):
    for path in re.findall(r"`([a-z]\w*(?:\.[a-z]\w*)+)`", page.read_text()):
        if path.split(".")[0] in chart()["properties"] and not is_setting(path):
            assert is_value(path), path


@of_each_page
def test_phases_and_waits_that_a_page_names_are_in_the_code(page):
    for name in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", page.read_text()):
        assert f'"{name}"' in product(), name


@each("name", sorted(alerts()))
def test_the_settings_that_an_alert_names_exist(name):
    """In its texts, which have no marks; `$labels.run` is none."""
    for text in alerts()[name]["annotations"].values():
        for path in re.findall(r"(?<![\w$/.])[a-z_]+(?:\.[a-z_]+)+", text):
            assert is_setting(path), path


@cache
def chart():
    return json.loads((ROOT / "helm" / "penstock" / "values.schema.json").read_text())


@cache
def product():
    """The code of every service."""
    folders = ("services", "learner", "rollout", "verifier", "deploy")
    return "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def is_value(path):
    """Whether the chart's schema has this value; beyond an object that it leaves open, everything is one."""
    node = chart()
    for part in path.split("."):
        while "$ref" in node:
            node = chart()["$defs" if "$defs" in chart() else "definitions"][node["$ref"].split("/")[-1]]
        if "properties" not in node:
            return node.get("additionalProperties") is not False
        if part not in node["properties"]:
            return False
        node = node["properties"][part]
    return True


def is_setting(path):
    try:
        check_setting(path)
    except AssertionError:
        return False
    return True


def check_setting(path):
    model = Recipe
    for part in path.split("."):
        assert part in model.model_fields, f"{path}: {model.__name__} has no {part}"
        inner = model.model_fields[part].annotation
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else model
