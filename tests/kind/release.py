"""Owns the installed release as the drills see it: its pods, and its runs through `penstock` in the API's pod.

Must not decide what is right; the drills do.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from tests.kind import commands
from tests.kind.shell import RehearsalError, Shell, until

READY_S, STEPS_S, RUN_S = 900.0, 1200.0, 2400.0
ENDED = ("succeeded", "failed", "cancelled")
SHORT = commands.DEADLINES["short"]


@dataclass(frozen=True)
class LivePod:
    """A pod that is not being deleted."""

    name: str
    uid: str
    node: str
    component: str
    ready: bool


class Release:
    """The release in the cluster of KUBECONFIG."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self._token = ""

    def pods(self, component: str = "") -> list[LivePod]:
        """The pods of a component, or of the whole release. Raises RehearsalError."""
        found = []
        for pod in json.loads(self.shell.output(commands.pods(component), SHORT))["items"]:
            metadata, status = pod["metadata"], pod.get("status", {})
            if "deletionTimestamp" in metadata or status.get("phase") in ("Succeeded", "Failed"):
                continue
            ready = any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in status.get("conditions", [])
            )
            node = pod["spec"].get("nodeName", "")
            label = metadata["labels"].get("app.kubernetes.io/component", "")
            found.append(LivePod(metadata["name"], metadata["uid"], node, label, ready))
        return found

    def ready(self, component: str, *, other_than: frozenset[str] = frozenset()) -> list[LivePod]:
        """Wait for a ready pod of a component whose uid is not among `other_than`. Raises RehearsalError."""

        def look() -> list[LivePod] | None:
            pods = [pod for pod in self.pods(component) if pod.ready and pod.uid not in other_than]
            return pods or None

        return until(f"a ready pod of {component}", READY_S, look)

    def penstock(self, *arguments: str, given: str = "") -> str:
        """The output of a `penstock` command. Raises RehearsalError if it fails."""
        if not self._token:
            self._token = base64.b64decode(self.shell.output(commands.token(), SHORT)).decode()
        return self.shell.output(commands.penstock(*arguments), SHORT, f"{self._token}\n{given}")

    def view(self, run: str) -> dict[str, Any]:
        """The run as the API answers it. Raises RehearsalError."""
        view = json.loads(self.penstock("show", run, "--json"))
        assert isinstance(view, dict)
        return view

    def start_run(self) -> str:
        """Submit the drills' run, and wait until it has trained two steps; returns its id. Raises RehearsalError."""
        text = commands.RECIPE.read_text(encoding="utf-8")

        def submit() -> str | None:
            return self.penstock("submit", "/dev/stdin", given=text).strip() or None

        # The API may still be starting after the drill before this one.
        run = until("the API to accept a run", READY_S, submit)
        until(f"two steps of {run}", STEPS_S, lambda: self._trained(run, 2))
        return run

    def _trained(self, run: str, steps: int) -> dict[str, Any] | None:
        view = self.view(run)
        if view["state"] in ("failed", "cancelled"):
            raise EndedError(f"{run} is {view['state']}: {json.dumps(view['history'][-1:])}")
        return view if view["rollout_steps"] >= steps else None

    def must_train(self, run: str) -> None:
        """The run is still in training. Raises RehearsalError: a drill after its end would show nothing."""
        view = self.view(run)
        if view["state"] != "running" or view["rollout_steps"] >= view["rollout_steps_total"]:
            raise RehearsalError(
                f"{run} is {view['state']} after {view['rollout_steps']} steps: expected it in training"
            )

    def must_succeed(self, run: str) -> str:
        """Wait until the run has succeeded, and check its counters; returns what they say. Raises RehearsalError."""

        def look() -> dict[str, Any] | None:
            view = self.view(run)
            return view if view["state"] in ENDED else None

        view = until(f"the end of {run}", RUN_S, look)
        return verdict(view)

    def events(self, run: str) -> str:
        """What happened in a run, one line each. Raises RehearsalError."""
        return self.penstock("events", run)

    def cancel(self, run: str) -> None:
        """Cancel a run, so that the next drill has the cluster for itself; one that has ended stays as it is."""
        self.shell.outcome(commands.penstock("cancel", run), SHORT, f"{self._token}\n")


class EndedError(Exception):
    """A run ended although it should have trained; no wait for it continues."""


def verdict(view: dict[str, Any]) -> str:
    """What the view of an ended run says. Raises RehearsalError unless it succeeded and lost or duplicated nothing."""
    groups = view["groups"]
    counted = ", ".join(f"{name} {groups[name]}" for name in ("dispatched", "trained", "filtered", "stale", "dead"))
    said = f"{view['state']}, {view['rollout_steps']} of {view['rollout_steps_total']} steps, {counted}"
    if view["state"] != "succeeded":
        raise RehearsalError(f"{said}: expected succeeded: {json.dumps(view['history'][-1:])}")
    if not groups["reconciled"]:
        raise RehearsalError(f"{said}: the counters do not reconcile")
    if view["rollout_steps"] != view["rollout_steps_total"] or not groups["trained"]:
        raise RehearsalError(f"{said}: expected all steps and trained groups")
    if groups["dead"]:
        raise RehearsalError(f"{said}: expected no dead group")
    return said
