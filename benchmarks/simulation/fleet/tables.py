"""Owns the tables of the fleets as Markdown, and the panels of the picture.

Must not simulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.report.picture import Panel, Series
from benchmarks.simulation.fleet.result import Result
from benchmarks.simulation.fleet.saturation import Part
from benchmarks.simulation.fleet.study import Study

Column = tuple[str, Callable[[Result], str]]
_WASTE: tuple[Column, ...] = (
    ("filtered", lambda found: f"{found.filtered:.1%}"),
    ("stale", lambda found: f"{found.stale:.1%}"),
    ("lost", lambda found: f"{found.lost:.3%}"),
)
_USE: tuple[Column, ...] = (
    ("groups/s", lambda found: f"{found.groups_per_s:.3g}"),
    ("of the bound", lambda found: f"{found.of_bound:.3f}"),
    ("fleet used", lambda found: f"{found.used:.1%}"),
    ("learner idle", lambda found: f"{found.idle:.1%}"),
    ("staleness: mean, most", lambda found: f"{found.staleness:.2f}, {found.stalest}"),
)
_SIZE: tuple[Column, ...] = (
    ("replicas", lambda found: f"{found.setup.replicas:,}"),
    ("batch", lambda found: f"{found.setup.batch:,}"),
)


def table(title: str, results: Sequence[Result], first: Sequence[Column], more: Sequence[Column] = ()) -> str:
    """One row per result."""
    columns = (*first, *_USE, *_WASTE, *more)
    rows = [f"| {' | '.join(name for name, _ in columns)} |", "|---" * len(columns) + "|"]
    rows += [f"| {' | '.join(cell(found) for _, cell in columns)} |" for found in results]
    return "\n".join((f"{title}:", "", *rows, ""))


def tables(found: Study) -> list[str]:
    """All tables of a study."""
    synchronous = {"refill": found.refilled, "generation batches": found.published}
    beside: list[Column] = [
        (f"of it, synchronous with {name}", lambda result, of=results: _beside(result, of))  # type: ignore[misc]
        for name, results in synchronous.items()
    ]
    bound: Column = ("max_staleness", lambda result: str(result.setup.max_staleness))
    stale: Column = ("stale groups", lambda result: f"{result.stale_groups:.1%}")
    way: Sequence[Column] = (
        ("prompts", lambda result: result.setup.population),
        ("selection", lambda result: result.setup.way.title),
    )
    signal: Sequence[Column] = (
        ("groups kept", lambda result: f"{result.kept:.3f}"),
        ("1 - p^G - (1-p)^G", lambda result: f"{result.signal:.3f}"),
    )
    return [
        table("Fleets, batches that grow with them, uniform draws", found.scales, _SIZE, beside),
        table("A batch that does not grow", found.fixed, _SIZE, [stale]),
        table(f"max_staleness with {found.base[0].setup.replicas} replicas", found.bounds, [bound], [stale]),
        table(
            f"Selections with {found.ways[0].setup.replicas} replicas, batch {found.ways[0].setup.batch}",
            found.ways,
            way,
            signal,
        ),
    ]


def _beside(result: Result, synchronous: Sequence[Result]) -> str:
    same = [other for other in synchronous if other.setup.replicas == result.setup.replicas]
    return f"{same[0].groups_per_s / result.groups_per_s:.2f}" if same else "-"


def _per_replica(result: Result) -> float:
    return result.groups_per_s / result.setup.replicas


def saturated(parts: Sequence[Part]) -> str:
    """At how many replicas each part is saturated."""
    rows = [f"| {part.name} | {part.replicas:,.0f} | {part.then} |" for part in parts]
    return "\n".join(("Saturated first:", "", "| part | replicas | then |", "|---|---|---|", *rows, ""))


def panels(found: Study) -> list[Panel]:
    """Use, staleness and waste by replicas; beside synchronous fleets; by max_staleness and selection."""
    kinds = (
        ("asynchronous", found.scales),
        ("synchronous, refill", found.refilled),
        ("synchronous, generation batches", found.published),
    )

    def by_kind(value: Callable[[Result], float]) -> tuple[Series, ...]:
        return tuple(_line(name, results, value) for name, results in kinds)

    trained = (
        *by_kind(_per_replica),
        _line("batch does not grow", found.fixed, _per_replica),
        _line("bound", found.scales, lambda each: each.setup.bound / each.setup.replicas, "--"),
    )
    staleness = (
        _line("mean", found.scales, lambda each: each.staleness),
        _line("most", found.scales, lambda each: each.stalest),
    )
    bounds = tuple(float(each.setup.max_staleness) for each in found.bounds)
    stale = Series("", bounds, tuple(each.stale_groups for each in found.bounds))
    return [
        Panel("fleet used", "replicas", "share", by_kind(lambda each: each.used), "x"),
        Panel("learner idle", "replicas", "share", by_kind(lambda each: each.idle), "x"),
        Panel("trained", "replicas", "groups/s per replica", trained, "x"),
        Panel("staleness", "replicas", "rollout steps", staleness, "x"),
        Panel("max_staleness", "rollout steps", "stale groups", (stale,)),
        _in_vain(found.ways),
    ]


def _line(label: str, results: Sequence[Result], value: Callable[[Result], float], style: str = "o-") -> Series:
    return Series(label, tuple(float(each.setup.replicas) for each in results), tuple(map(value, results)), style)


def _in_vain(ways: Sequence[Result]) -> Panel:
    """Tokens that are not trained, by selection; one series per population."""
    by_population: dict[str, list[Result]] = {}
    for each in ways:
        by_population.setdefault(each.setup.population, []).append(each)
    titles = ", ".join(each.setup.way.title for each in next(iter(by_population.values())))
    series = [
        Series(
            name,
            tuple(map(float, range(len(results)))),
            tuple(each.filtered + each.stale + each.lost for each in results),
            "o",
        )
        for name, results in by_population.items()
    ]
    return Panel(f"in vain: {titles}", "selection", "share of the tokens drawn", tuple(series))
