"""The bill of materials: Debian's packages, Python's distributions, the same bytes for the same content."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from deploy.images.sbom import SbomError, debian_components, document, python_bill

ROOT = Path(__file__).parents[2]
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u14
Description: GNU C Library
 Contains the standard libraries.

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0

Package: tzdata
Status: install ok installed
Architecture: all
Version: 2026a-0+deb12u1
"""
INSTALLED = {("libc6", "2.36-9+deb12u14"), ("tzdata", "2026a-0+deb12u1"), ("sluice", "1.2")}
"""The contents of STATUS and `environment`."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An interpreter whose environment contains one distribution."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    metadata = packages / "sluice-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sluice\nVersion: 1.2\n")
    return folder / "bin" / "python"


def test_only_installed_debian_packages_are_listed():
    found = debian_components(STATUS.splitlines(keepends=True))
    assert [str(component.purl) for component in found] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64",
        "pkg:deb/debian/tzdata@2026a-0%2Bdeb12u1?arch=all",
    ]


@pytest.mark.slow  # two scans of an environment
def test_the_document_has_both_and_is_reproducible(environment):
    texts = [document(python_bill(environment), debian_components(STATUS.splitlines(True))) for _ in range(2)]
    assert texts[0] == texts[1]
    bill = json.loads(texts[0])
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["specVersion"] == "1.6"
    assert {(component["name"], component["version"]) for component in bill["components"]} >= INSTALLED


def test_a_missing_interpreter_is_one_line():
    with pytest.raises(SbomError, match=r"--python: /nowhere/python cannot be scanned"):
        python_bill(Path("/nowhere/python"))


def test_the_command_writes_the_file_or_reports_why_not(environment, tmp_path):
    (tmp_path / "status").write_text(STATUS)
    command = [sys.executable, ROOT / "deploy/images/sbom.py", "--python", environment, "--output", tmp_path / "bill"]
    missing = subprocess.run([*command, "--dpkg-status", tmp_path / "none"], capture_output=True, text=True, timeout=60)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("sbom: ")
    assert missing.stderr.count("\n") == 1
    done = subprocess.run([*command, "--dpkg-status", tmp_path / "status"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sbom: 1 Python distributions, 2 Debian packages\n"
    written = json.loads((tmp_path / "bill").read_text())
    assert {(component["name"], component["version"]) for component in written["components"]} >= INSTALLED
