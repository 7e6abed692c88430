"""Owns `make test-kind`: the platform on a real Kubernetes of containers, from the image to the uninstall.

Must not touch another cluster or the user's kubeconfig, and deletes what it created, whatever happens.

`python -m tests.kind.run`; needs kind, kubectl, helm, and docker or podman. Exit status 0 if everything held, 1 if not,
2 if a program is missing. KEEP=1 keeps the cluster; KIND_IMAGE names another image of the nodes; ENGINE=docker or
podman selects the engine; KIND_LOGS the folder of logs after a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

from tests.kind import commands
from tests.kind.drills import DRILLS, perform, uninstall
from tests.kind.release import EndedError, Release
from tests.kind.shell import MissingProgramError, RehearsalError, Shell, say

DEADLINES = commands.DEADLINES
SHORT = DEADLINES["short"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def engine(environment: Mapping[str, str]) -> str:
    """The container engine. Raises MissingProgramError that names every missing program."""
    path = environment.get("PATH", "")
    missing = [name for name in commands.PROGRAMS if shutil.which(name, path=path) is None]
    wanted = environment.get("ENGINE") or ""
    if wanted and wanted not in commands.ENGINES:
        raise MissingProgramError(f"ENGINE: {wanted!r} is not valid: expected {' or '.join(commands.ENGINES)}")
    found = [name for name in commands.ENGINES if wanted in ("", name) and shutil.which(name, path=path) is not None]
    if not found:
        missing.append(wanted or " or ".join(commands.ENGINES))
    if missing:
        raise MissingProgramError(f"not on PATH: {', '.join(missing)}")
    return found[0]


def version() -> str:
    """Penstock's version, which is in the image's tag."""
    found = re.search(r'^version = "(.*)"$', (commands.ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert found is not None
    return found[1]


class Rehearsal:
    """One rehearsal in a cluster of its own."""

    def __init__(self, environment: Mapping[str, str], folder: Path, container_engine: str) -> None:
        self._engine = container_engine
        self._folder = folder
        self._environment = dict(environment) | {"KUBECONFIG": str(folder / "kubeconfig")}
        if container_engine == "podman":
            self._environment["KIND_EXPERIMENTAL_PROVIDER"] = "podman"
        self.shell = Shell(commands.ROOT, self._environment)
        self.cluster = f"penstock-test-{os.getpid()}"
        self._created = False
        self.results: list[tuple[str, str, bool]] = []
        """Step, what was seen, and whether it held."""

    def run(self) -> bool:
        """All steps; returns whether all held. Raises RehearsalError where no drill could follow."""
        release = Release(self.shell)
        try:
            self._install()
            for component in ("redis", "api", "head"):
                release.ready(component)
        except RehearsalError:
            if self._created:
                self._describe("install")
            raise
        self._step("helm test", self._test)
        for drill in DRILLS:
            self._step(drill.name, partial(perform, release, drill))
        self._step("uninstall", partial(uninstall, release))
        return all(held for _, _, held in self.results)

    def _step(self, name: str, step: Callable[[], str]) -> None:
        say(f"== {name}")
        try:
            self.results.append((name, step(), True))
        except (RehearsalError, EndedError) as error:
            self.results.append((name, str(error), False))
            say(f"FAILED: {name}: {error}")
            self._describe(name)

    def _install(self) -> None:
        shell, name = self.shell, version()
        shell.follow(commands.build(self._engine), DEADLINES["build"])
        shell.follow(commands.tag(self._engine, name), SHORT)
        archive = self._folder / "image.tar"
        shell.follow(commands.save(self._engine, name, archive), DEADLINES["load"])
        if self.cluster in shell.output(commands.clusters(), SHORT).split():
            raise RehearsalError(f"kind has a cluster {self.cluster} already: expected none")
        image = self._environment.get("KIND_IMAGE") or commands.NODE_IMAGE
        # Before the command: it may leave a part of a cluster.
        self._created = True
        shell.follow(commands.create_cluster(self.cluster, image), DEADLINES["cluster"])
        shell.follow(commands.load(self.cluster, archive), DEADLINES["load"])
        archive.unlink()
        shell.follow(commands.install_operator(), DEADLINES["operator"])
        shell.follow(commands.create_namespace(), SHORT)
        shell.follow(commands.install_chart(), DEADLINES["install"])

    def _test(self) -> str:
        self.shell.follow(commands.test_release(), DEADLINES["test"])
        return "passed"

    def _describe(self, step: str) -> None:
        """Print the state of the cluster, and write its logs to a folder."""
        logs = Path(self._environment.get("KIND_LOGS") or commands.ROOT / "runs" / "kind") / step.replace(" ", "-")
        for command in [*commands.describe(), commands.export_logs(self.cluster, logs)]:
            try:
                self.shell.follow(command, DEADLINES["short"])
            except RehearsalError as error:
                say(str(error))
        say(f"logs of {step}: {logs}")

    def close(self) -> bool:
        """Delete the cluster, if it was created; returns whether that worked. With KEEP=1 it is kept."""
        if self._created and self._environment.get("KEEP") == "1":
            say(f"kept, for KUBECONFIG={self._environment['KUBECONFIG']}; to delete it:")
            say(" ".join(commands.delete_cluster(self.cluster)))
            return True
        try:
            if self._created:
                self.shell.follow(commands.delete_cluster(self.cluster), DEADLINES["cluster"])
        except RehearsalError as error:
            say(f"the cluster {self.cluster} may be left: {error}")
            return False
        shutil.rmtree(self._folder, ignore_errors=True)
        return True


def stop(number: int, _frame: FrameType | None) -> None:
    """End on a signal as on an error: the cluster is deleted."""
    raise SystemExit(128 + number)


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Run the rehearsal; returns the exit status."""
    try:
        found = engine(environment)
    except MissingProgramError as error:
        print(f"test-kind: {error}", file=sys.stderr)
        return 2
    for number in SIGNALS:
        signal.signal(number, stop)
    rehearsal = Rehearsal(environment, Path(tempfile.mkdtemp(prefix="penstock-kind-")), found)
    held = False
    try:
        held = rehearsal.run()
    except RehearsalError as error:
        say(f"FAILED: {error}")
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        deleted = rehearsal.close()
    for name, said, step_held in rehearsal.results:
        print(f"{'ok' if step_held else 'FAILED':7}{name}: {said}", flush=True)
    return 0 if held and deleted else 1


if __name__ == "__main__":
    sys.exit(main())
