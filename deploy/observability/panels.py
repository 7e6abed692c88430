"""Owns the conversion of a table of panels to a Grafana dashboard: layout, variables, annotations, colours.

Must not name a metric, except those of variables and annotations; the tables in deploy.observability.dashboards do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Kind: TypeAlias = Literal["graph", "stack", "stat", "states", "table", "bars"]
WIDTH, HEIGHT = 24, 8
TAG = "penstock"
RELEASES = {
    "namespace": "label_values(penstock_runs, namespace)",
    "release": 'label_values(penstock_runs{namespace=~"$namespace"}, release)',
    "run": 'label_values(penstock_run_state{namespace=~"$namespace", release=~"$release"}, run)',
}
"""The variables of every dashboard, by name; each narrows the next."""
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: PromQL by legend. `unit`: Grafana's name of it (`s`, `percentunit`, `short`).

    `thresholds`: the colour from a value upwards. `low`, `high`: limits of the axis. `span`: width in columns, of 24.
    """

    title: str
    description: str
    queries: dict[str, str]
    unit: str = "short"
    thresholds: dict[float, str] = field(default_factory=dict)
    kind: Kind = "graph"
    span: int = 8
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Board:
    """One dashboard: panels by row. `variables`: queries by name, in addition to the data source and RELEASES."""

    uid: str
    title: str
    description: str
    rows: dict[str, tuple[Panel, ...]]
    variables: dict[str, str] = field(default_factory=dict)
    since: str = "now-3h"


def render(board: Board) -> str:
    """The dashboard as JSON; deterministic."""
    numbers = iter(range(1, 10_000))
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .time(board.since, "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .variables(list(_variables(board)))
        .annotation(_alerts())
        .link(_siblings())
    )
    for title, panels in board.rows.items():
        builder.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            builder.with_panel(_panel(panel, next(numbers)))
    return json.dumps(builder.build(), cls=JSONEncoder, sort_keys=True, indent=2) + "\n"


def _variables(board: Board) -> Iterator[Any]:
    yield dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    for name, query in {**RELEASES, **board.variables}.items():
        yield (
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(SOURCE)
            .query(query)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(models.VariableOption(selected=True, text="All", value="$__all"))
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
        )


def _alerts() -> Any:
    return (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr('ALERTS{alertstate="firing", namespace=~"$namespace|", release=~"$release|", run=~"$run|"}')
    )


def _siblings() -> Any:
    link = dashboard.DashboardLink("Penstock").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(True).include_vars(True).keep_time(True)


def _panel(panel: Panel, number: int) -> Any:
    built = KINDS[panel.kind]().id(number).title(panel.title).description(panel.description).datasource(SOURCE)
    built = built.unit(panel.unit).span(panel.span).height(HEIGHT).thresholds(_thresholds(panel))
    if panel.low is not None:
        built = built.min(panel.low)
    if panel.high is not None:
        built = built.max(panel.high)
    for index, (legend, expression) in enumerate(panel.queries.items()):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + index))
        if panel.kind == "table":
            query = query.instant().format(PromQueryFormat.TABLE)
        built = built.with_target(query)
    return built


def _thresholds(panel: Panel) -> Any:
    steps = [models.Threshold(value=None, color="green")]
    steps += [models.Threshold(value=value, color=color) for value, color in panel.thresholds.items()]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _graph() -> Any:
    legend = common.VizLegendOptions().show_legend(True).display_mode(common_models.LegendDisplayMode.TABLE)
    legend = legend.placement(common_models.LegendPlacement.BOTTOM).calcs(["lastNotNull", "max"])
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    style = common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
    tooltip = tooltip.sort(common_models.SortOrder.DESCENDING)
    return timeseries.Panel().legend(legend).tooltip(tooltip).thresholds_style(style)


def _stack() -> Any:
    stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
    return _graph().stacking(stacking).fill_opacity(30)


def _stat() -> Any:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _bars() -> Any:
    return bargauge.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _states() -> Any:
    return statetimeline.Panel().merge_values(True)


def _table() -> Any:
    return table.Panel().show_header(True)


KINDS: dict[Kind, Callable[[], Any]] = {
    "graph": _graph,
    "stack": _stack,
    "stat": _stat,
    "states": _states,
    "table": _table,
    "bars": _bars,
}
