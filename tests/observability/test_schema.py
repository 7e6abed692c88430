"""Dashboards fit Grafana's schema, and every reference within one resolves."""

import re
from copy import deepcopy

from tests.harness.each import each
from tests.observability.grafana_schema import faults
from tests.observability.reading import dashboards, panels

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
BUILT_IN = {"__rate_interval", "__all"}


@each("name", sorted(dashboards()))
def test_a_dashboard_fits_grafanas_schema(name):
    assert faults(dashboards()[name]) == []


WRONG = {
    "an unknown field": (("fieldConfig", "defaults", "custm"), 1, "unknown field"),
    "an unknown option": (("options", "lgend"), {}, "unknown field"),
    "an unknown field of a query": (("targets", 0, "exp"), "up", "unknown field"),
    "a type that is no text": (("type",), 3, "no str"),
    "a width that is text": (("gridPos", "w"), "8", "no int"),
    "an unknown legend": (("options", "legend", "displayMode"), "tble", "is not one of"),
    "an unknown mode of thresholds": (("fieldConfig", "defaults", "thresholds", "mode"), "x", "is not one of"),
}


@each("what", sorted(WRONG))
def test_a_wrong_field_is_found(what):
    path, value, expected = WRONG[what]
    board = deepcopy(dashboards()["penstock-fleet.json"])
    place = panels(board)[0]
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    [fault] = faults(board)
    assert expected in fault


@each("name", sorted(dashboards()))
def test_every_reference_resolves(name):
    board = dashboards()[name]
    assert re.fullmatch(r"[a-z0-9-]{1,40}", board["uid"])
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert len(set(variables)) == len(variables)
    named = set(re.findall(r"\$\{?(\w+)", str([board["panels"], board["templating"], board["annotations"]])))
    assert named <= {*variables, *BUILT_IN}, "variables that do not exist"
    assert set(variables) <= named, "variables that nothing reads"
    sources = [panel["datasource"] for panel in panels(board)]
    sources += [variable["datasource"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    sources += [annotation["datasource"] for annotation in board["annotations"]["list"]]
    assert all(source == SOURCE for source in sources)
    for panel in panels(board):
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for target in panel["targets"]:
            kept = set(re.findall(r"{{(\w+)}}", target.get("legendFormat") or ""))
            assert all(re.search(rf"\b{label}\b", target["expr"]) for label in kept - {"instance"}), panel["title"]
