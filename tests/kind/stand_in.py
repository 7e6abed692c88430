"""Owns a stand-in for kind, kubectl, helm and the engine: a release whose pods and runs are in memory.

Must not be used outside tests; it shows that the rehearsal's own steps work, and nothing about Kubernetes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.kind import commands
from tests.kind.drills import PROTECTED
from tests.kind.shell import RehearsalError, shown

TOKEN = "a-token"
COMPONENTS = ("api", "redis", "head", "cpu", "verifier", "rollout", "learner")
BLOCKED = "error when evicting pods: Cannot evict pod as it would violate the pod's disruption budget."


class StandIn:
    """Used in place of a Shell. `faults`: what goes wrong; `seen`: every command, in order."""

    faults: ClassVar[set[str]] = set()
    existing: ClassVar[list[str]] = []
    """Clusters that exist before."""
    latest: ClassVar[StandIn]

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.clusters = list(self.existing)
        self.seen: list[list[str]] = []
        self.cordoned: set[str] = set()
        self._uids = 0
        self.pods: dict[str, str] = {}
        """Component -> uid of its only pod."""
        self._runs: dict[str, int] = {}
        """Run -> how often it was shown."""
        type(self).latest = self

    def follow(self, command: list[str], deadline_s: float) -> None:
        self.output(command, deadline_s)

    def output(self, command: list[str], deadline_s: float, given: str = "") -> str:
        status, output, errors = self.outcome(command, deadline_s, given)
        if status:
            raise RehearsalError(f"`{shown(command)}` has exit status {status}: {errors}")
        return output

    def outcome(self, command: list[str], deadline_s: float, given: str = "") -> tuple[int, str, str]:
        assert deadline_s > 0
        self.seen.append(command)
        name = " ".join(command)
        if any(fault in name for fault in self.faults):
            if "create cluster" in name:
                self._kind(command)  # kind may leave a part of it
            return 1, "", "a fault"
        return self._answer(command, name, given)

    def _answer(self, command: list[str], name: str, given: str) -> tuple[int, str, str]:
        program = command[0]
        if program == "kind":
            return self._kind(command)
        if program == "helm":
            return self._helm(command)
        if program == "kubectl":
            return self._kubectl(command, name, given)
        if "save" in command:
            Path(command[command.index("--output") + 1]).touch()
        return 0, "", ""

    def _kind(self, command: list[str]) -> tuple[int, str, str]:
        if command[1:3] == ["get", "clusters"]:
            return 0, "\n".join(self.clusters), ""
        cluster = command[command.index("--name") + 1]
        if command[1] == "create":
            self.clusters.append(cluster)
        elif command[1] == "delete":
            self.clusters.remove(cluster)
        return 0, "", ""

    def _helm(self, command: list[str]) -> tuple[int, str, str]:
        changes_all = any(word.startswith("logLevel") for word in command)
        if command[1:3] == ["install", commands.RELEASE] or (command[1] == "upgrade" and changes_all):
            for component in COMPONENTS:
                self._replace(component)
        elif command[1] == "upgrade" and "a restart" in self.faults:
            self._replace("rollout")
        elif command[1] == "uninstall":
            self.pods.clear()
        return 0, "v3.19.0" if command[1] == "version" else "", ""

    def _replace(self, component: str) -> None:
        self._uids += 1
        self.pods[component] = f"uid-{self._uids}"

    def _kubectl(self, command: list[str], name: str, given: str) -> tuple[int, str, str]:
        if command[1] == "uncordon":
            self.cordoned.remove(command[2])
            return 0, "", ""
        if command[1] == "drain":
            self.cordoned.add(command[2])
            evicted = set(COMPONENTS) - (set() if "no budget" in self.faults else set(PROTECTED))
            for component in evicted:
                self._replace(component)
            return (0, "", "") if "no budget" in self.faults else (1, "", BLOCKED)
        if "exec" in command:
            token, _, rest = given.partition("\n")
            assert token == TOKEN, "the token is the first line"
            assert TOKEN not in name, "the token is no argument"
            return self._penstock(command[command.index(commands.IN_POD) + 2 :], rest)
        verb = command[3:5]
        if verb == ["get", "pods"]:
            wanted = command[6].partition("component=")[2]
            items = [self._pod(component) for component in self.pods if wanted in ("", component)]
            return 0, json.dumps({"items": items}), ""
        if verb == ["delete", "pod"]:
            self._replace(command[5].rpartition("-")[2])
        answers = {
            "secret": base64.b64encode(TOKEN.encode()).decode(),
            "persistentvolumeclaims": "\n".join(f"persistentvolumeclaim/{claim}" for claim in commands.CLAIMS),
        }
        return 0, answers.get(verb[-1], ""), ""

    def _pod(self, component: str) -> dict[str, Any]:
        return {
            "metadata": {
                "name": f"penstock-{component}",
                "uid": self.pods[component],
                "labels": {"app.kubernetes.io/component": component},
            },
            "spec": {"nodeName": "worker"},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }

    def _penstock(self, arguments: list[str], given: str) -> tuple[int, str, str]:
        if arguments[0] == "submit":
            assert given == commands.RECIPE.read_text()
            run = f"drill-{len(self._runs)}"
            self._runs[run] = 0
            return 0, f"{run}\n", ""
        if arguments[0] == "show":
            self._runs[arguments[1]] += 1
            # The second look is the one before the drill.
            return 0, json.dumps(self._view(ended=self._runs[arguments[1]] > 2)), ""
        return 0, "learner-restarted" if arguments[0] == "events" else "[]", ""

    def _view(self, ended: bool) -> dict[str, Any]:
        groups = {"dispatched": 80, "trained": 80, "filtered": 0, "stale": 0, "dead": 0, "reconciled": True}
        if "a lost group" in self.faults:
            groups["reconciled"] = False
        return {
            "state": "succeeded" if ended else "running",
            "rollout_steps": 20 if ended else 5,
            "rollout_steps_total": 20,
            "groups": groups,
            "history": [],
        }
