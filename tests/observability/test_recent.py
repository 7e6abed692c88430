"""Windows over the last rollout steps: exact, of bounded cost, the same after a restart, gone with the run."""

import statistics

from prometheus_client import REGISTRY

from services.metrics import families, forget
from services.metrics.recent import (
    COUNTED,
    EXTREMES,
    FEWEST,
    LONGEST,
    RECENT,
    WINDOWED,
    forget_recent,
    show_committed,
    show_history,
)
from services.metrics.tables import STEP_METRICS
from tests.observability.reading import alerts, matchers_of, rules


def window(run, family, steps, statistic):
    labels = {"run": run, "steps": str(steps), "statistic": statistic}
    return REGISTRY.get_sample_value(f"penstock_recent_{family}", labels)


def shown(run):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in RECENT.values()
        for metric in family.collect()
        for sample in metric.samples
        if sample.labels["run"] == run
    }


def test_windows_are_those_of_the_last_steps(run_id):
    values = [float(number % 7) for number in range(80)]
    for count, value in enumerate(values, 1):
        show_committed(run_id, {"entropy": value})
        last = values[:count]
        assert window(run_id, "entropy_nats", 10, "mean") == (statistics.fmean(last[-10:]) if count >= 10 else None)
        median = statistics.median(last[-LONGEST:]) if count >= 20 else None
        assert window(run_id, "entropy_nats", LONGEST, "median") == median
    forget(run_id)
    assert shown(run_id) == {}


def test_the_furthest_median_of_the_run_is_kept(run_id):
    values = [float(number % 7) + (number if number < 70 else 140 - number) for number in range(120)]
    medians = []
    for count, value in enumerate(values, 1):
        show_committed(run_id, {"entropy": value, "response_length": -value})
        if count >= FEWEST:
            medians.append(statistics.median(values[max(0, count - LONGEST) : count]))
        highest = max(medians, default=None)
        assert window(run_id, "entropy_nats", "all", "highest_median") == highest
        assert window(run_id, "response_length_tokens", "all", "lowest_median") == (
            None if highest is None else -highest
        )
    assert medians[-1] < max(medians) > medians[0], "it lies within the run, outside of every window"
    forget(run_id)
    assert shown(run_id) == {}


def test_a_metric_counts_only_the_steps_that_have_it(run_id):
    for step in range(40):
        show_committed(run_id, {"reward": 1.0} | ({"logprob_difference_mean": 0.5} if step % 4 == 0 else {}))
    assert window(run_id, "reward", 10, "mean") == 1.0
    assert window(run_id, "logprob_difference_mean_nats", 10, "mean") == 0.5
    assert window(run_id, "logprob_difference_mean_nats", LONGEST, "median") is None, "only ten of forty steps"
    forget(run_id)


def test_one_event_is_summed_from_the_first_step_on(run_id):
    for step in range(25):
        show_committed(run_id, {"skipped_optimizer_steps": 2.0 if step in (0, 14) else 0.0})
        expected = 2.0 if step < 10 or step >= 14 else 0.0
        assert window(run_id, "skipped_optimizer_steps", 10, "sum") == (0.0 if step == 24 else expected), step
    forget(run_id)


def test_a_restarted_learner_shows_the_same_windows(run_id):
    names = (*WINDOWED, *COUNTED)
    steps = [{name: float((7 * step + place) % 11) for place, name in enumerate(names)} for step in range(90)]
    for metrics in steps:
        show_committed(run_id, metrics)
    before = shown(run_id)
    series = 2 * len(WINDOWED) + len(EXTREMES) + len(COUNTED)
    assert len(before) == series, "the cost: one to three series of a run by metric"
    forget_recent(run_id)
    show_history(run_id, steps)
    assert shown(run_id) == before
    show_history(run_id, steps[:15])
    assert {name[2] for name in shown(run_id)} == {"10"}, "a rewound run has fewer steps"
    show_history(run_id, [])
    assert shown(run_id) == {}, "a run that starts again from the model has none"
    forget(run_id)


def test_only_windows_that_a_rule_reads_are_exported():
    assert {*WINDOWED, *COUNTED} <= set(STEP_METRICS)
    assert {family._name for family in RECENT.values()} <= {family._name for family in families()}
    read = {}
    for rule in rules():
        for metric, label, value in matchers_of(rule["expr"]):
            if metric.startswith("penstock_recent_") and label in ("steps", "statistic"):
                read.setdefault(metric, set()).add(value)
    assert set(read) == {family._name for family in RECENT.values()}, alerts().keys()
    over_all = {RECENT[name]._name: statistic for name, (statistic, _) in EXTREMES.items()}
    assert set(over_all) == {metric for metric, values in read.items() if "all" in values}
    assert all(statistic in read[metric] for metric, statistic in over_all.items())
