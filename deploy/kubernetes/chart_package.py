"""Owns the chart as a package: the chart of the sources, with the repository and the digests of published images.

Must import nothing but the standard library: it runs where nothing of Penstock is installed. Needs `helm` on PATH.

`python -m deploy.kubernetes.chart_package FOLDER --repository R --cpu SHA256 --gpu SHA256`, as `make chart` does.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

CHART = Path(__file__).parents[2] / "helm" / "penstock"
REPOSITORY = re.compile(r"[a-z0-9.:_-]+(/[a-z0-9._-]+)+")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
FIELD = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z0-9_]+):(?P<rest>.*)$")
PACKAGE_S = 60.0


class ChartPackageError(ValueError):
    """The chart cannot be packaged. The text is one line for the user."""


def with_values(text: str, wanted: Mapping[str, str]) -> str:
    """A values.yaml with other values for some dotted paths; comments stay. Raises ChartPackageError for others."""
    lines, path, left = text.splitlines(keepends=True), list[tuple[int, str]](), dict(wanted)
    for number, line in enumerate(lines):
        found = FIELD.match(line)
        if found is None:
            continue
        indent = len(found["indent"])
        path = [step for step in path if step[0] < indent] + [(indent, found["name"])]
        value = left.pop(".".join(name for _, name in path), None)
        if value is not None:
            lines[number] = f'{found["indent"]}{found["name"]}: "{value}"\n'
    if left:
        raise ChartPackageError(f"values.yaml: no {', '.join(sorted(left))}")
    return "".join(lines)


def package(folder: Path, repository: str, digests: Mapping[str, str]) -> Path:
    """Write the package to a folder, with `digests` of the images by target; returns its path.

    Raises ChartPackageError, at the latest after 60 s.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ChartPackageError(
            f"--repository: {repository!r} is not valid: expected REGISTRY/NAME in lower case, no tag"
        )
    for target, digest in digests.items():
        if not DIGEST.fullmatch(digest):
            raise ChartPackageError(f"--{target}: {digest!r} is not valid: expected sha256: and 64 hexadecimal digits")
    wanted = {"image.repository": repository} | {f"image.{target}.digest": digests[target] for target in digests}
    with tempfile.TemporaryDirectory(prefix="penstock-chart-") as name:
        copy = Path(name) / CHART.name
        shutil.copytree(CHART, copy)
        values = copy / "values.yaml"
        values.write_text(with_values(values.read_text(encoding="utf-8"), wanted), encoding="utf-8")
        command = ["helm", "package", str(copy), "--destination", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PACKAGE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ChartPackageError(f"helm package: {error}") from None
    if done.returncode:
        raise ChartPackageError(f"helm package: {done.stderr.strip()[-500:]}")
    return Path(done.stdout.strip().rpartition(" ")[2])


def main(arguments: list[str] | None = None) -> int:
    """Write the package and print its path; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.kubernetes.chart_package")
    parser.add_argument("folder", type=Path, help="where the package is written")
    parser.add_argument("--repository", required=True, help="registry and repository of the images, without tag")
    parser.add_argument("--cpu", required=True, help="digest of the image without CUDA")
    parser.add_argument("--gpu", required=True, help="digest of the image with CUDA")
    parsed = parser.parse_args(arguments)
    try:
        print(package(parsed.folder, parsed.repository, {"cpu": parsed.cpu, "gpu": parsed.gpu}))
    except ChartPackageError as error:
        print(f"chart_package: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
