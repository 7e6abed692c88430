"""Tests that a group has what all groups have unless its section says otherwise, and that older values still work.

Must not check what a single value does; the other tests of the chart do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.each import each
from tests.helm.cases import DEFAULTS, EXISTING_SECRETS, ROLES, section, values_of
from tests.helm.rendering import CHART, NAMESPACE, Case, Document, HelmError, default_values, helm, load_all, render

PREVIOUS = Path(__file__).with_name("data") / "previous-values.yaml"
OF_ALL = {
    "nodeSelector": {"pool": "all", "zone": "a"},
    "tolerations": [{"key": "all", "operator": "Exists"}],
    "env": [{"name": "OF_ALL", "value": "1"}],
    "annotations": {"of": "all"},
    "requests": {"cpu": "1", "memory": "1Gi"},
    "cpus": 6,
    "priorityClassName": "standard",
    "minAvailable": 1,
}
SHARED = DEFAULTS.but({"groupDefaults": OF_ALL, "storage": {"claim": {"accessMode": "ReadWriteMany"}}})


def test_every_group_has_what_all_groups_have() -> None:
    rendering = render(SHARED)
    for role in ROLES:
        pod = rendering.pod(role)
        assert pod.spec["nodeSelector"] == OF_ALL["nodeSelector"]
        assert pod.spec["tolerations"][0]["key"] == "all"
        assert pod.spec["priorityClassName"] == "standard"
        assert pod.main.env["OF_ALL"] == {"name": "OF_ALL", "value": "1"}
        assert pod.annotations["of"] == "all"
        assert pod.main.document["resources"]["requests"]["memory"] == "1Gi"
    assert {role: rendering.group(role)["rayStartParams"]["num-cpus"] for role in ROLES} == {
        "cpu": "6",
        "verifier": "6",
        "verifier-code": "6",
        "rollout": "8",
        "learner": "16",
    }
    head = rendering.pod("head")
    assert "priorityClassName" not in head.spec
    assert "OF_ALL" not in head.main.env


@each(
    "own, expected",
    [
        ({"nodeSelector": {"pool": "own"}}, {"nodeSelector": {"pool": "own", "zone": "a"}}),
        ({"nodeSelector": {}}, {"nodeSelector": OF_ALL["nodeSelector"]}),
        ({"tolerations": []}, {"tolerations": []}),
        ({"tolerations": None}, {"tolerations": OF_ALL["tolerations"]}),
        ({"priorityClassName": ""}, {"priorityClassName": None}),
        ({"priorityClassName": "high"}, {"priorityClassName": "high"}),
        ({"priorityClassName": None}, {"priorityClassName": "standard"}),
    ],
)
def test_mappings_are_merged_and_the_rest_is_replaced(own: Document, expected: Document) -> None:
    without_gpus = SHARED.but({role: {"gpus": 0} for role in ("rollout", "learner")})  # nor tolerations for them
    spec = render(without_gpus.but({"verifier": own})).pod("verifier").spec
    assert {name: spec.get(name, [] if name == "tolerations" else None) for name in expected} == expected


def test_zero_is_a_value_and_null_is_none() -> None:
    assert not render(SHARED.but({"cpu": {"minAvailable": 0}})).has("PodDisruptionBudget", "cpu")
    assert render(SHARED.but({"cpu": {"minAvailable": None}})).has("PodDisruptionBudget", "cpu")
    less = render(SHARED.but({"cpu": {"requests": {"cpu": "2"}}})).pod("cpu").main.document["resources"]["requests"]
    assert less == {"cpu": "2", "memory": "1Gi"}


@each("name", sorted(default_values()["groupDefaults"]))
def test_null_among_the_defaults_is_the_charts_own(name: str) -> None:
    """The templates repeat the defaults of values.yaml for values that lack them."""
    assert without_secrets(EXISTING_SECRETS.but({"groupDefaults": {name: None}})) == without_secrets(EXISTING_SECRETS)


def test_the_memory_of_gpus_is_only_that_of_groups_with_gpus() -> None:
    bounds = load_all(
        render(DEFAULTS.but({"groupDefaults": {"gpuMemoryGiB": 80}}))
        .one("ConfigMap", name="demo-penstock-bounds")
        .at("data", "bounds.json")
    )[0]
    assert {role: bounds[role].get("gpu_memory_gib") for role in ("cpu", "verifier", "rollout", "learner")} == {
        "cpu": None,
        "verifier": None,
        "rollout": 80,
        "learner": 80,
    }


def with_values(folder: Path, values: Path) -> Path:
    """The chart with other values.yaml: so Helm renders an upgrade with `--reuse-values`."""
    chart = folder / "penstock"
    shutil.copytree(CHART, chart, dirs_exist_ok=True)
    shutil.copy(values, chart / "values.yaml")
    return chart


def upgraded(chart: Path, *settings: str) -> list[Document]:
    """The objects of the chart with `settings`, without the Secrets, which are new without a cluster."""
    arguments = [argument for setting in settings for argument in ("--set-json", setting)]
    text = helm("template", "demo", str(chart), "--namespace", NAMESPACE, "--is-upgrade", *arguments)
    return [document for document in load_all(text) if document["kind"] != "Secret"]


def test_an_upgrade_that_reuses_the_previous_values_renders(tmp_path: Path) -> None:
    found = upgraded(with_values(tmp_path, PREVIOUS))
    new = [manifest.document for manifest in render(DEFAULTS).manifests if manifest.kind != "Secret"]
    names = [(document["kind"], document["metadata"]["name"]) for document in found]
    assert names == [(document["kind"], document["metadata"]["name"]) for document in new]
    clusters = [next(of for of in documents if of["kind"] == "RayCluster") for documents in (found, new)]
    groups = [[group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]] for cluster in clusters]
    assert groups[0] == groups[1]


def test_reused_values_with_monitoring_render(tmp_path: Path) -> None:
    values = load_all(PREVIOUS.read_text())[0]
    for part in ("serviceMonitor", "scrapeConfig", "rules", "dashboards"):
        values["metrics"][part]["enabled"] = True
    old = tmp_path / "old.yaml"
    old.write_text(json.dumps(values))
    kinds = {document["kind"] for document in upgraded(with_values(tmp_path, old))}
    assert {"ServiceMonitor", "ScrapeConfig", "PrometheusRule"} <= kinds


@each(
    "section",
    ["hub", "tracking", "prices", "rewardFunctions", "verifierCode", "groupDefaults"],
)
def test_an_upgrade_renders_without_a_section_that_is_new(tmp_path: Path, section: str) -> None:
    values = {name: value for name, value in load_all(PREVIOUS.read_text())[0].items() if name != section}
    old = tmp_path / "old.yaml"
    old.write_text(json.dumps(values))
    assert upgraded(with_values(tmp_path, old))


@each(
    "section", ["api", "cpu", "head", "image", "learner", "metrics", "ray", "redis", "rollout", "storage", "verifier"]
)
def test_a_missing_section_is_one_clear_line(tmp_path: Path, section: str) -> None:
    values = {name: value for name, value in load_all(PREVIOUS.read_text())[0].items() if name != section}
    old = tmp_path / "old.yaml"
    old.write_text(json.dumps(values))
    with pytest.raises(HelmError) as refused:
        upgraded(with_values(tmp_path, old))
    assert f"{section} is required" in str(refused.value)
    assert "nil pointer" not in str(refused.value)


def test_a_budget_that_null_removed_stays_removed(tmp_path: Path) -> None:
    """Helm keeps a null that finds no default, as one of an earlier upgrade with `--reuse-values`."""
    values = load_all(PREVIOUS.read_text())[0]
    budgets = {"api": "maxUnavailable", "redis": "minAvailable", "head": "minAvailable", "rollout": "minAvailable"}
    for component, name in {**budgets, "rewardFunctions": "maxUnavailable"}.items():
        del values[component][name]
    old = tmp_path / "old.yaml"
    old.write_text(json.dumps(values))
    settings = [f"{component}.{name}=null" for component, name in budgets.items()]
    settings.append('rewardFunctions={"enabled":true,"maxUnavailable":null}')
    found = upgraded(with_values(tmp_path, old), *settings)
    kept = {document["metadata"]["name"] for document in found if document["kind"] == "PodDisruptionBudget"}
    assert kept == {"demo-penstock-learner"}


def test_groups_of_the_previous_values_file_are_the_same() -> None:
    previous = load_all(PREVIOUS.read_text())[0]
    case = EXISTING_SECRETS.but({section(role): previous[section(role)] for role in ROLES})
    assert without_secrets(case) == without_secrets(EXISTING_SECRETS)


def test_previous_values_take_new_defaults_of_groups(tmp_path: Path) -> None:
    """A group of the previous chart states each value, even an empty one; only mappings take the new defaults."""
    found = upgraded(
        with_values(tmp_path, PREVIOUS), 'groupDefaults={"nodeSelector":{"pool":"a"},"priorityClassName":"high"}'
    )
    cluster = next(document for document in found if document["kind"] == "RayCluster")
    for group in cluster["spec"]["workerGroupSpecs"]:
        spec: dict[str, Any] = group["template"]["spec"]
        assert spec["nodeSelector"] == {"pool": "a"}
        assert "priorityClassName" not in spec


def test_old_values_files_render_as_the_short_ones() -> None:
    """Every value written into every group, as the previous chart's files did."""
    of = values_of(DEFAULTS)
    written: Document = {
        section(role): {name: of[section(role)][name] for name in default_values()["groupDefaults"]} for role in ROLES
    }
    written["learner"]["minAvailable"] = 1
    assert without_secrets(EXISTING_SECRETS.but(written)) == without_secrets(EXISTING_SECRETS)


def without_secrets(case: Case) -> list[Document]:
    """All objects but Secrets, whose generated tokens differ."""
    return [manifest.document for manifest in render(case).manifests if manifest.kind != "Secret"]
