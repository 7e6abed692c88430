"""Owns the PromQL expressions that several dashboards share.

Must not lay out a panel.
"""

from __future__ import annotations

RELEASE = 'namespace=~"$namespace", release=~"$release"'
"""The chosen releases. A release is known by its namespace and its name: nothing else is unique."""
RUN = f'{RELEASE}, run=~"$run"'
RATE = "$__rate_interval"


def chosen(metric: str, matchers: str = "") -> str:
    """A selector for the metric in the chosen runs, narrowed by `matchers`."""
    return f"{metric}{{{RUN}, {matchers}}}" if matchers else f"{metric}{{{RUN}}}"


def grouped(by: str) -> str:
    """The clause that aggregates by these labels within each release."""
    return f"by (namespace, release, {by})" if by else "by (namespace, release)"


def most(metric: str, by: str, matchers: str = "") -> str:
    """The maximum per label set `by`: one process exports the metric, or all export the same value."""
    return f"max {grouped(by)} ({chosen(metric, matchers)})"


def rate(metric: str, by: str, matchers: str = "") -> str:
    """The rate of a counter per second, summed `by` labels."""
    return f"sum {grouped(by)} (rate({chosen(metric, matchers)}[{RATE}]))"


def increase(metric: str, by: str, matchers: str = "", within: str = "10m") -> str:
    """The increase of a counter `within` a window, summed `by` labels."""
    return f"sum {grouped(by)} (increase({chosen(metric, matchers)}[{within}]))"


def quantile(q: float, metric: str, by: str, matchers: str = "") -> str:
    """The quantile `q` (0 to 1) of a histogram, `by` labels."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', f'{by}, le', matchers)})"


def setting(family: str) -> str:
    """An exported setting of the recipe, one series per run; `family` as in services.metrics.tables."""
    return most(f"penstock_setting_{family}", "run")


def step(*families: str) -> dict[str, str]:
    """Step metrics of the chosen runs by legend; `families` as in services.metrics.tables."""
    queries = {family: most(f"penstock_step_{family}", "run") for family in families}
    return {f"{{{{run}}}} {family}" if len(families) > 1 else "{{run}}": query for family, query in queries.items()}


def events(phases: str, within: str = "10m") -> dict[str, str]:
    """The number of events by phase `within` a window, by legend; `phases` is a regular expression."""
    return {"{{run}} {{phase}}": increase("penstock_events_total", "run, phase", f'phase=~"{phases}"', within)}
