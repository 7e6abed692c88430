"""Owns the PromQL that several dashboards share.

Must not lay out a panel.
"""

from __future__ import annotations

RUN = 'run=~"$run"'
RATE = "$__rate_interval"


def chosen(metric: str, matchers: str = "") -> str:
    """A metric of the runs chosen; `matchers` narrow it further."""
    return f"{metric}{{{RUN}, {matchers}}}" if matchers else f"{metric}{{{RUN}}}"


def most(metric: str, by: str, matchers: str = "") -> str:
    """The highest of each group of series: one process, or all alike, show it."""
    return f"max by ({by}) ({chosen(metric, matchers)})"


def rate(metric: str, by: str, matchers: str = "") -> str:
    """The rate of a counter, per second, summed `by` labels."""
    return f"sum by ({by}) (rate({chosen(metric, matchers)}[{RATE}]))"


def grown(metric: str, by: str, matchers: str = "", within: str = "10m") -> str:
    """By how much a counter grew, summed `by` labels."""
    return f"sum by ({by}) (increase({chosen(metric, matchers)}[{within}]))"


def quantile(share: float, metric: str, by: str, matchers: str = "") -> str:
    """A quantile of a histogram `by` labels."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'{by}, le', matchers)})"


def setting(name: str) -> str:
    """A number of the recipe, one series a run."""
    return most("penstock_setting", "run", f'name="{name}"')


def step(*names: str) -> dict[str, str]:
    """Step metrics of the runs chosen, by legend; several ones are told apart by their names."""
    queries = {name: most("penstock_step_metric", "run", f'name="{name}"') for name in names}
    return {f"{{{{run}}}} {name}" if len(names) > 1 else "{{run}}": query for name, query in queries.items()}


def events(phases: str, within: str = "10m") -> dict[str, str]:
    """How often the events of these words came, by legend; `phases` is a regular expression."""
    return {"{{run}} {{phase}}": grown("penstock_events_total", "run, phase", f'phase=~"{phases}"', within)}
