"""Dashboards: the committed files match the code, and everything they name exists."""

import re
import shutil

from deploy.observability import __main__ as command
from deploy.observability.dashboards import BOARDS
from deploy.observability.panels import render
from services.contracts import COMMON_PHASES, PHASES
from services.controller.run_metrics import PROCESS_STATES
from tests.harness.each import each
from tests.observability.external import EXTERNAL
from tests.observability.reading import (
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


def test_the_committed_files_are_what_the_code_writes():
    assert command.main(["--check"]) == 0


def test_writing_is_deterministic_and_repairs_files(tmp_path, monkeypatch, capsys):
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
        numbers = [panel["id"] for panel in board["panels"]]
        assert len(set(numbers)) == len(numbers), name
        taken = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken, (name, panel["title"])
            assert max(x for x, _ in cells) < 24, (name, panel["title"])
            taken |= cells


def test_every_panel_has_a_description():
    for name, board in dashboards().items():
        titles = [panel["title"] for panel in panels(board)]
        assert len(set(titles)) == len(titles), name
        for panel in panels(board):
            assert panel["description"].endswith("."), (name, panel["title"])
            assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, (name, panel["title"])
            assert panel["targets"], (name, panel["title"])
        assert {"datasource", "run"} <= {variable["name"] for variable in board["templating"]["list"]}, name
        assert [annotation["name"] for annotation in board["annotations"]["list"]] == ["Alerts"], name


@each("where, expression", dashboard_expressions, called=": ".join)
def test_every_expression_reads_only_what_is_exported(where, expression):
    known = exported() | recorded() | set(EXTERNAL)
    assert metrics_of(expression) <= known, where


def label_values():
    """By metric and label: the possible values, if the code defines them."""
    return {
        ("penstock_events_total", "phase"): {*COMMON_PHASES, *(phase for words in PHASES.values() for phase in words)},
        ("penstock_processes", "state"): set(PROCESS_STATES),
    }


def test_label_values_in_rules_and_dashboards_exist():
    known = label_values()
    everything = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    everything += dashboard_expressions()
    for where, expression in everything:
        for metric, label, pattern in matchers_of(expression):
            values = known.get((metric, label))
            for part in pattern.split("|") if values else ():
                assert any(re.fullmatch(part, value) for value in values), f"{where}: {metric} has no {label}={part!r}"
