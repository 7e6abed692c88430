"""Dashboards: what is committed is what the code writes, and everything they name exists."""

import re
import shutil

from deploy.observability import __main__ as command
from deploy.observability.dashboards import BOARDS
from deploy.observability.panels import render
from learner.algorithm.loss import HISTOGRAMS, PERCENTILES, SUMS, means
from services.contracts import COMMON_PHASES, PHASES
from services.controller.run_metrics import PROCESS_STATES, settings_shown
from services.settings import parse_recipe
from tests.harness.each import each
from tests.harness.small_run import recipe_document
from tests.observability.reading import (
    OF_EVERY_PROCESS,
    OF_PROMETHEUS,
    dashboard_expressions,
    dashboards,
    exported,
    matchers_of,
    metrics_of,
    panels,
    recorded,
    rules,
)

UNITS = {"short", "s", "percentunit", "bytes"}
OF_THE_SAMPLER = {
    "accuracy", "reward", "response_length", "truncated_share", "staleness_mean", "staleness_max",
    "rollout_tokens_per_trained_token", "groups_kept", "groups_filtered", "groups_stale", "groups_dead",
    "groups_screened_out",
}  # fmt: skip
OF_THE_LEARNER = {
    "loss", "gradient_norm", "learning_rate", "zero_advantage_share", "learning_seconds", "publish_seconds",
}  # fmt: skip
"""Beside what learner.algorithm.loss means; the real run in test_prometheus.py shows all of them."""


def test_the_committed_files_are_what_the_code_writes():
    assert command.main(["--check"]) == 0


def test_writing_is_deterministic_and_mends_what_differs(tmp_path, monkeypatch, capsys):
    assert all(render(board) == render(board) for board in BOARDS)
    monkeypatch.setattr(command, "FOLDER", tmp_path / "dashboards")
    assert command.main([]) == 0
    [path, *_] = sorted((tmp_path / "dashboards").glob("*.json"))
    path.write_text("{}")
    shutil.copy(path, path.with_name("old.json"))
    assert command.main(["--check"]) == 1
    assert {path.name, "old.json"} <= set(re.findall(r"[\w-]+\.json", capsys.readouterr().out))
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0


def test_identifiers_are_unique_and_panels_do_not_overlap():
    boards = dashboards()
    assert {name.removesuffix(".json") for name in boards} == {board["uid"] for board in boards.values()}
    assert len({board["title"] for board in boards.values()}) == len(boards)
    for name, board in boards.items():
        numbers = [one["id"] for one in board["panels"]]
        assert len(set(numbers)) == len(numbers), name
        taken = set()
        for one in board["panels"]:
            place = one["gridPos"]
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken, (name, one["title"])
            assert max(x for x, _ in cells) < 24, (name, one["title"])
            taken |= cells


def test_every_panel_explains_itself():
    for name, board in dashboards().items():
        titles = [one["title"] for one in panels(board)]
        assert len(set(titles)) == len(titles), name
        for one in panels(board):
            assert one["description"].endswith("."), (name, one["title"])
            assert one["fieldConfig"]["defaults"]["unit"] in UNITS, (name, one["title"])
            assert one["targets"], (name, one["title"])
        assert {"datasource", "run"} <= {one["name"] for one in board["templating"]["list"]}, name
        assert [one["name"] for one in board["annotations"]["list"]] == ["Alerts"], name


@each("where, expression", dashboard_expressions, called=": ".join)
def test_every_expression_reads_only_what_is_exported(where, expression):
    known = exported() | recorded() | OF_PROMETHEUS | OF_EVERY_PROCESS
    assert metrics_of(expression) <= known, where


def labels_known():
    """By metric and label: the values there are, where the code fixes them."""
    import torch

    histograms = torch.ones(len(HISTOGRAMS), 513, dtype=torch.int64)
    steps = {*means(torch.ones(len(SUMS)), histograms), *OF_THE_SAMPLER, *OF_THE_LEARNER, "groups_with_1_of_4_correct"}
    assert f"ratio_p{PERCENTILES[0]}" in steps
    return {
        ("penstock_step_metric", "name"): steps,
        ("run:penstock_step_metric:max", "name"): steps,
        ("penstock_setting", "name"): set(settings_shown(parse_recipe(recipe_document("/model")))),
        ("penstock_events_total", "phase"): {*COMMON_PHASES, *(one for words in PHASES.values() for one in words)},
        ("penstock_processes", "state"): set(PROCESS_STATES),
    }


def test_label_values_that_rules_and_dashboards_ask_for_exist():
    known = labels_known()
    everything = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()] + list(
        dashboard_expressions()
    )
    for where, expression in everything:
        for metric, label, pattern in matchers_of(expression):
            values = known.get((metric, label))
            for one in pattern.split("|") if values else ():
                assert any(re.fullmatch(one, value) for value in values), f"{where}: {metric} has no {label}={one!r}"
