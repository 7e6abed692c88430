"""Owns an image's software bill of materials: every Python distribution and Debian package, as CycloneDX 1.6 JSON.

Must not import Penstock: it runs in the build environment, not in the environment that it describes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from debian.deb822 import Deb822
from packageurl import PackageURL

SCAN_S = 300.0
INSTALLED = "install ok installed"


class SbomError(RuntimeError):
    """The bill cannot be written. The text is one line for the user."""


def python_bill(python: Path) -> Bom:
    """The distributions installed for `python`, an interpreter. Raises SbomError, at the latest after 300 s."""
    command = [str(Path(sys.executable).with_name("cyclonedx-py")), "environment", str(python), "--output-reproducible"]
    command += ["--spec-version", "1.6", "--output-format", "JSON", "--output-file", "-"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCAN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SbomError(f"--python: {python} cannot be scanned: {error}") from None
    if done.returncode:
        raise SbomError(f"--python: {python} cannot be scanned: {done.stderr.strip()[-500:]}")
    bill = Bom.from_json(json.loads(done.stdout))  # type: ignore[attr-defined]
    assert isinstance(bill, Bom)
    return bill


def debian_components(lines: Iterable[str]) -> list[Component]:
    """The installed packages in dpkg's status file, as components with a package URL."""
    components = []
    for package in Deb822.iter_paragraphs(lines, use_apt_pkg=False):
        if package.get("Status") != INSTALLED:
            continue
        name, version = package["Package"], package["Version"]
        url = PackageURL("deb", "debian", name, version, {"arch": package["Architecture"]})
        components.append(
            Component(name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=url.to_string())
        )
    return components


def document(bill: Bom, packages: Iterable[Component]) -> str:
    """The bill with the packages added, as JSON; equal contents give equal bytes."""
    for package in packages:
        bill.components.add(package)
    outputter = make_outputter(bill, OutputFormat.JSON, SchemaVersion.V1_6)
    written = json.loads(outputter.output_as_string())
    # The library adds a unique number and the time to every document.
    written.pop("serialNumber", None)
    written.get("metadata", {}).pop("timestamp", None)
    return json.dumps(written, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Write the bill; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python sbom.py")
    parser.add_argument("--python", required=True, type=Path, help="interpreter of the environment to describe")
    parser.add_argument("--dpkg-status", required=True, type=Path, help="dpkg's status file of the image")
    parser.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args()
    try:
        with arguments.dpkg_status.open(encoding="utf-8") as lines:
            packages = debian_components(lines)
        bill = python_bill(arguments.python)
    except (SbomError, OSError) as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 2
    counted = len(bill.components)
    arguments.output.write_text(document(bill, packages), encoding="utf-8")
    print(f"sbom: {counted} Python distributions, {len(packages)} Debian packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
