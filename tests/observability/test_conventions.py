"""Metric names follow Prometheus' conventions, and every step metric and exported setting has its own family."""

import re

import torch

from learner.algorithm.loss import HISTOGRAMS, SUMS, means
from learner.algorithm.parity import EngineComparison
from services.contracts import (
    DROP_CAUSES,
    CommittedPolicy,
    Outcome,
    SamplerState,
    reward_metric,
    reward_names,
)
from services.metrics import families, forget
from services.metrics.tables import REWARD_SCORE, SETTINGS, STEP_METRICS, show_step, step_gauge
from services.sampler.queue.batching import Window, make_batch
from services.settings import Recipe
from tests.harness.each import each
from tests.observability.reading import ROOT, recorded
from tests.services.sampler.judged import group_of, recipe

UNITS = {
    *("seconds", "bytes", "ratio", "nats", "versions", "tokens", "tokens_per_second", "groups", "groups_per_step"),
    *(
        "batches",
        "decisions",
        "entries",
        "errors",
        "events",
        "failures",
        "faults",
        "gpus",
        "letters",
        "messages",
        "payloads",
    ),
    *("places", "processes", "prompts", "replicas", "rows", "runs", "samples", "sequences", "steps"),
    *("verdicts", "waits"),
}
"""The valid endings of a name: the unit of its values, or what they count."""
WITHOUT_UNIT = {
    "penstock_run_state": "1 for one of several states",
    "penstock_policy_version": "a number that identifies a version",
    "penstock_starvation_level": "a level, 0 to 4",
    "penstock_cost": "an amount of the currency that its label names",
    "penstock_replicas_desired": "counts replicas, as kube_deployment_spec_replicas and its status metrics do",
    "penstock_step_reward": "dimensionless, -2 to 1",
    "penstock_recent_reward": "as the reward",
    "penstock_step_score": "dimensionless, 0 to 1, as verifiers define it",
    "penstock_reward_score": "as the score",
    "penstock_step_loss": "dimensionless",
    "penstock_step_return": "as the reward",
    "penstock_step_value_loss": "dimensionless",
    "penstock_step_gradient_norm": "dimensionless",
    "penstock_step_learning_rate": "dimensionless",
}
"""Families whose values have no unit, and why."""
RESERVED = re.compile(r"_(total|count|sum|bucket|created|info|share|ms|s|millis|percent|mib|kib|gib)$")
FREE_LABELS = {"name", "metric", "setting", "unit", "le", "quantile", "job", "instance"}
"""Labels that would put several units into one family, or that belong to Prometheus."""
OF_THE_LEARNER = (
    *("loss", "gradient_norm", "learning_rate", "zero_advantage_share"),
    *("skipped_optimizer_steps", "learning_seconds", "publish_seconds", "batch_wait_seconds", "commit_wait_seconds"),
)
"""In addition to those of learner.algorithm.loss; tests/learner/test_service.py compares with a real step."""

of_each_family = each("family", tuple(families()), called=lambda family: family._name)


@of_each_family
def test_a_name_ends_with_its_unit(family):
    assert re.fullmatch(r"penstock(_[a-z0-9]+)+", family._name)
    assert not RESERVED.search(family._name)
    has_unit = any(family._name.endswith(f"_{unit}") for unit in UNITS)
    assert has_unit != (family._name in WITHOUT_UNIT)


@of_each_family
def test_a_type_fits_its_name_and_labels(family):
    assert family._type in ("gauge", "counter", "histogram")
    assert family._type != "histogram" or family._name.endswith("_seconds")
    assert not FREE_LABELS & set(family._labelnames)
    assert family._documentation.endswith(".")


def test_families_without_a_unit_exist():
    assert set(WITHOUT_UNIT) <= {family._name for family in families()}


def test_recorded_names_have_level_metric_and_operation():
    for name in recorded():
        assert re.fullmatch(r"run:penstock_[a-z0-9_]+:(max|rate10m|rate1h)", name), name
        metric = name.split(":")[1]
        assert metric in WITHOUT_UNIT or any(metric.endswith(f"_{unit}") for unit in UNITS), name


def step_metrics():
    """The name of every step metric, from the code that creates it."""
    settings, window = recipe(), Window(recipe())
    group = group_of(*[(Outcome.CORRECT, 4, False, 3)] * 4, rewards=[{"has-a-box": 1.0}] * 4)
    window.judged(group, "kept")
    state = SamplerState(cursor=1, next_group=1, scan=0, draws=1)
    policy = CommittedPolicy(version=3, step=3, version_steps='{"3": 3}')
    batch = make_batch(settings, 4, policy, {"g": group}, state, window.metrics())
    sums = torch.ones(len(SUMS))
    sums[SUMS.index("return_squared")] = 2.0
    learned = means(sums, torch.ones(len(HISTOGRAMS), 513, dtype=torch.int64))
    comparison = EngineComparison(["a"])
    comparison.add(sums, sums, torch.zeros(len(SUMS), dtype=torch.int64))
    learned |= comparison.metrics()
    dropped = [f"prompts_{cause.replace('-', '_')}" for cause in DROP_CAUSES]
    return {*batch.sampling_metrics, *learned, *dropped, *assigned(), *OF_THE_LEARNER}


def assigned():
    """Step metrics that the sampler or the learner adds by name: metrics["groups_missing"] = ..."""
    files = [path for folder in ("services/sampler", "learner") for path in (ROOT / folder).rglob("*.py")]
    return {name for path in files for name in re.findall(r'(?:metrics|counts)\["(\w+)"\] = ', path.read_text())}


def test_every_step_metric_has_a_family(run_id):
    names = step_metrics()
    assert {name for name in names if step_gauge(run_id, name) is None} == set()
    assert set(STEP_METRICS) - names == set(), "families of step metrics that no code creates"
    forget(run_id)


def test_every_named_reward_is_a_series_of_its_own(run_id):
    def scores():
        [family] = REWARD_SCORE.collect()
        return {found.labels["reward"]: found.value for found in family.samples if found.labels["run"] == run_id}

    assert reward_names([reward_metric("has-a-box"), "reward", "score", reward_metric("b2")]) == ["b2", "has-a-box"]
    show_step(run_id, {"reward": -0.5, "reward_has_a_box": 0.25, "reward_style": 0.75})
    assert scores() == {"has-a-box": 0.25, "style": 0.75}
    show_step(run_id, {"reward_style": 0.5})
    assert scores() == {"style": 0.5}, "a reward without a value in this step is not shown"
    forget(run_id)
    assert scores() == {}


def test_every_exported_setting_exists():
    for path in SETTINGS:
        section, name = path.split(".")
        assert name in Recipe.model_fields[section].annotation.model_fields, path


def test_a_step_replaces_the_metrics_of_the_previous_one(run_id):
    def shown():
        return {family._name for family in families() if (run_id,) in getattr(family, "_metrics", {})}

    show_step(run_id, {"entropy": 1.5, "kl_reference": 0.1, "of_another_version": 1.0})
    assert shown() == {"penstock_step_entropy_nats", "penstock_step_reference_kl_nats"}
    show_step(run_id, {"entropy": 1.25, "groups_with_3_of_4_correct": 2.0})
    assert shown() == {"penstock_step_entropy_nats"}
    assert STEP_METRICS["entropy"].labels(run_id)._value.get() == 1.25
    assert step_gauge(run_id, "groups_with_3_of_4_correct")._value.get() == 2.0
    forget(run_id)
    assert shown() == set()
