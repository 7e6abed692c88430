"""deploy/compose.yaml: valid by the specification, closed to other machines, and every file that it names exists."""

import hashlib
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "compose.yaml"
COMPOSE = yaml.safe_load(FILE.read_text())
SERVICES = COMPOSE["services"]
BINDS = [
    (name, volume.split(":")[0])
    for name, service in SERVICES.items()
    for volume in service["volumes"]
    if volume.startswith(".")
]
PREPARE = ROOT / "deploy" / "compose" / "prepare.sh"


def test_valid_by_the_compose_specification():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", FILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_confined(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


def test_foreign_images_are_pinned_and_ours_has_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, service in SERVICES.items():
        if name == "penstock":
            assert service["image"] == f"${{PENSTOCK_IMAGE:-penstock:{version}-cpu}}"
            assert service["build"]["target"] == "${PENSTOCK_TARGET:-cpu}", (
                "the built image must be the one that is run"
            )
        else:
            assert re.fullmatch(r"docker\.io/\S+:v?\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}", service["image"]), name


def test_redis_is_not_published_and_the_rest_on_loopback():
    assert "ports" not in SERVICES["redis"]
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_monitoring_is_opt_in():
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert profiles == {"redis": [], "penstock": [], "prometheus": ["monitoring"], "grafana": ["monitoring"]}


@pytest.mark.parametrize(("service", "source"), BINDS)
def test_mounted_files_exist(service, source):
    assert (FILE.parent / source).resolve().exists(), f"{service} mounts {source}, which does not exist"


def test_prometheus_finds_its_rules():
    mounted = dict(volume.split(":")[:2] for volume in SERVICES["prometheus"]["volumes"])
    (configuration,) = [
        option.split("=", 1)[1] for option in SERVICES["prometheus"]["command"] if "config.file" in option
    ]
    assert mounted["./observability/prometheus.yml"] == configuration
    rules = Path(os.path.relpath(mounted["../helm/penstock/files/rules"], Path(configuration).parent))
    assert rules == Path("../../helm/penstock/files/rules")


def test_used_secrets_and_volumes_are_declared():
    for service in SERVICES.values():
        used = [secret["source"] if isinstance(secret, dict) else secret for secret in service.get("secrets", [])]
        assert set(used) <= COMPOSE["secrets"].keys()
        named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
        assert named <= COMPOSE["volumes"].keys()
    variables = [value for service in SERVICES.values() for value in service.get("environment", {}).values()]
    read = {Path(value).name for value in variables if value.startswith("/run/secrets/")}
    assert read == {"penstock-password", "grafana-password", "access"}


def test_passwords_are_written_once_and_are_private(tmp_path):
    script = tmp_path / "prepare.sh"
    script.write_bytes(PREPARE.read_bytes())
    first = subprocess.run(["sh", script], capture_output=True, text=True, timeout=30, check=True)
    folder = tmp_path / "secrets"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    written = {path.name: path.read_text() for path in folder.iterdir()}
    access = yaml.safe_load(written.pop("access.yaml"))
    assert written.keys() | {"access"} == COMPOSE["secrets"].keys() | {"api-token"}, "for users of the API"
    assert {token["name"]: token["sha256"] for token in access["tokens"]} == {
        name: hashlib.sha256(written[name].encode()).hexdigest() for name in ("api-token", "prometheus-token")
    }
    assert len(set(written.values())) == len(written)
    assert all(re.fullmatch(r"[0-9a-f]{48}", password) for password in written.values())
    # The containers' users must be able to read them.
    assert all(os.stat(folder / name).st_mode & stat.S_IROTH for name in written)
    again = subprocess.run(["sh", script], capture_output=True, text=True, timeout=30, check=True)
    assert {name: (folder / name).read_text() for name in written} == written
    assert yaml.safe_load((folder / "access.yaml").read_text()) == access
    assert (first.stdout.count(": written"), again.stdout.count(": kept")) == (6, 6)
    assert not any(password in first.stdout + again.stdout for password in written.values())


def test_git_and_the_build_exclude_the_passwords():
    for secret in COMPOSE["secrets"].values():
        path = (FILE.parent / secret["file"]).resolve().relative_to(ROOT)
        assert "/deploy/compose/secrets/" in (ROOT / ".gitignore").read_text().split()
        assert path.is_relative_to("deploy/compose/secrets")
    assert "deploy/compose" in (ROOT / ".dockerignore").read_text().split()


def test_the_command_exists_in_the_cli():
    program, *arguments = SERVICES["penstock"]["command"]
    assert program == "penstock"
    options = [option for option in arguments if option.startswith("--")]
    command = [sys.executable, "-m", "deploy.cli.main", arguments[0], "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(option in text for option in options)


def test_grafana_is_provisioned_from_the_mounted_folder():
    provider = yaml.safe_load((ROOT / "deploy/compose/grafana/dashboards.yaml").read_text())["providers"][0]
    mounted = {volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted
    source = yaml.safe_load((ROOT / "deploy/compose/grafana/datasources.yaml").read_text())["datasources"][0]
    # Prometheus has no host name: it shares the network of `penstock`.
    assert SERVICES["prometheus"]["network_mode"] == "service:penstock"
    assert source["url"] == "http://penstock:9090"
