"""Alerts on learning depend on steps, not on their duration: the same step fires them at 3 s and at 20 min a step."""

import subprocess
from itertools import groupby

import yaml
from prometheus_client import REGISTRY

from services.metrics import forget
from services.metrics.recent import RECENT, show_committed
from tests.harness.each import each
from tests.harness.programs import needed
from tests.observability.reading import alerts

HEALTHY, SICK = 40, 30
"""Steps: a run is healthy, then sick."""
BATCH = {"groups_screened_out": 0.0, "groups_dead": 0.0, "mismatch_kl": 0.002}
WELL = {
    **BATCH,
    "entropy": 0.6,
    "reward": 0.2,
    "response_length": 400.0,
    "truncated_share": 0.05,
    "staleness_mean": 1.0,
    "effective_sample_size": 0.95,
    "logprob_difference_mean": 0.02,
    "zero_advantage_share": 0.0,
    "accuracy": 0.5,
    "groups_kept": 8.0,
    "groups_filtered": 8.0,
    "groups_stale": 0.0,
    "publish_seconds": 20.0,
    "skipped_optimizer_steps": 0.0,
    "logprob_off_replicas": 0.0,
}
FALLS_ILL = {
    "EntropyCollapse": ({"entropy": 0.05}, 8),
    "RewardCollapse": ({"reward": -0.9}, 5),
    "ResponseLengthBlowUp": ({"response_length": 900.0}, 5),
    "TruncatedResponses": ({"truncated_share": 0.5}, 6),
    "StalenessAtLimit": ({"staleness_mean": 4.0}, 10),
    "EffectiveSampleSizeLow": ({"effective_sample_size": 0.3}, 7),
    "OffPolicyRatioHigh": ({"mismatch_kl": 0.2}, 3),
    "LogprobDifferenceRises": ({"logprob_difference_mean": 0.038}, 6),
    "ZeroAdvantageRatioHigh": ({"zero_advantage_share": 0.75}, 7),
    "CorrectRatioShift": ({"accuracy": 0.95}, 6),
    "SamplingStarves": ({"groups_kept": 1.0, "groups_filtered": 15.0}, 6),
    "GroupsGoStale": ({"groups_stale": 8.0, "groups_filtered": 4.0}, 5),
    "WeightSyncSlow": ({"publish_seconds": 200.0}, 8),
    "NonFiniteGradients": ({"skipped_optimizer_steps": 1.0}, 1),
    "LogprobsDiffer": ({"logprob_off_replicas": 2.0}, 1),
}
"""By alert: the step metrics that change when the run falls ill, and the sick step with which it fires."""
SETTINGS = {"limits_max_staleness_steps": 4, "weights_timeout_seconds": 300}


def test_every_alert_that_reads_windows_is_covered():
    assert set(FALLS_ILL) == {name for name, rule in alerts().items() if "penstock_recent_" in rule["expr"]}
    assert all("for" not in alerts()[name] for name in FALLS_ILL), "a duration means another number of steps each time"


def test_no_alert_on_learning_reads_a_window_of_time():
    on_learning = {name: rule for name, rule in alerts().items() if rule["file"] == "learning.yaml"}
    assert on_learning
    assert [name for name, rule in on_learning.items() if "[" in rule["expr"] or "for" in rule] == []


def falls_ill(sick):
    """The metrics of a run's steps: healthy ones, then those with `sick`."""
    return [WELL | (sick if step >= HEALTHY else {}) for step in range(HEALTHY + SICK)]


def exported_by_step(run, steps):
    """By step, from 0: what the learner exports after it, as {series: value}."""
    found = [{}]
    for metrics in steps:
        show_committed(run, metrics)
        found.append(
            {
                "{}{{{}}}".format(
                    sample.name, ", ".join(f'{name}="{value}"' for name, value in sample.labels.items())
                ): (sample.value)
                for family in RECENT.values()
                for sample in REGISTRY._names_to_collectors[family._name].collect()[0].samples
                if sample.labels["run"] == run
            }
        )
    forget(run)
    return found


def scraped(by_step, step_s, scrape_s):
    """promtool's series of a run whose steps take `step_s` seconds, scraped every `scrape_s` seconds."""
    total = len(by_step) * step_s // scrape_s + 4
    at = [by_step[min(index * scrape_s // step_s, len(by_step) - 1)] for index in range(total)]
    series = []
    for name in sorted({name for values in by_step for name in values}):
        runs = [(value, len(list(same))) for value, same in groupby(values.get(name) for values in at)]
        # In promtool `_x3` is three samples, but `5x3` is four.
        texts = [f"_x{count}" if value is None else f"{value!r}x{count - 1}" for value, count in runs]
        series.append({"series": name, "values": " ".join(texts)})
    return series


def step_alerts(folder):
    """The rules of these alerts without annotations, whose values depend on the moment of a scrape."""
    chosen = [
        {key: value for key, value in rule.items() if key in ("alert", "expr", "labels")}
        for name, rule in alerts().items()
        if name in FALLS_ILL
    ]
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "steps", "rules": chosen}]}))
    return file


@each("step_s, scrape_s", [(3, 15), (1200, 300)])
def test_the_same_step_fires_an_alert_at_any_speed(step_s, scrape_s, tmp_path):
    """A scrape later than that step at the latest, and a scrape before it not yet; a healthy run never."""
    series = scraped(exported_by_step("well", falls_ill({})), step_s, scrape_s)
    moments = []
    for name, (sick, fires_at) in FALLS_ILL.items():
        series += scraped(exported_by_step(name, falls_ill(sick)), step_s, scrape_s)
        scrape = (HEALTHY + fires_at) * step_s // scrape_s * scrape_s
        fired = {"exp_labels": {"severity": alerts()[name]["labels"]["severity"], "run": name}}
        for at, expected in ((scrape - scrape_s, []), (scrape + scrape_s, [fired])):
            moments.append({"alertname": name, "eval_time": f"{at}s", "exp_alerts": expected})
    series += [
        {"series": f'penstock_setting_{setting}{{run="{run}"}}', "values": f"{value}x{10**4}"}
        for setting, value in SETTINGS.items()
        for run in ("well", *FALLS_ILL)
    ]
    check(tmp_path, scrape_s, series, moments)


def check(folder, scrape_s, series, moments):
    """Let promtool evaluate the rules of the alerts at these moments."""
    test = {"interval": f"{scrape_s}s", "input_series": series, "alert_rule_test": moments}
    case = folder / "case.yaml"
    case.write_text(
        yaml.safe_dump(
            {"rule_files": [str(step_alerts(folder))], "evaluation_interval": f"{scrape_s}s", "tests": [test]}
        )
    )
    done = subprocess.run([needed("promtool"), "test", "rules", case], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


LONG = 250
"""Steps of a run that changes slowly."""
DRIFTS = {
    "EntropyCollapse": lambda step: {"entropy": 0.6 * 0.98**step},
    "RewardCollapse": lambda step: {"reward": 0.6 - 0.005 * step},
    "ResponseLengthBlowUp": lambda step: {"response_length": 400 * 1.01**step, "reward": 0.4 - 0.002 * step},
}
"""By alert: the step metrics of a run that goes wrong so slowly that no window of 50 steps shows it."""


def learns(step):
    """A run that learns: longer responses, more reward, and entropy that falls to half of its start."""
    return {"response_length": 400 * 1.01**step, "reward": -0.5 + 0.005 * step, "entropy": 0.6 * 0.997**step}


def test_a_slow_decline_fires_and_goes_on_firing(tmp_path):
    runs = {"learns": learns, **DRIFTS}
    series = [
        line
        for run, metrics in runs.items()
        for line in scraped(exported_by_step(run, [WELL | metrics(step) for step in range(LONG)]), 60, 60)
    ]
    moments = [
        {
            "alertname": name,
            "eval_time": f"{step}m",
            "exp_alerts": [{"exp_labels": {"severity": "warning", "run": run}} for run in expected],
        }
        for name in DRIFTS
        for step, expected in ((40, []), (200, [name]), (LONG, [name]))
    ]
    check(tmp_path, 60, series, moments)
