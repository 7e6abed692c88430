"""Owns the drills of `make test-kind`: what happens to a release in training, and what must hold afterwards.

Must not build or install anything; run.py does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from tests.kind import commands
from tests.kind.release import READY_S, Release
from tests.kind.shell import RehearsalError, say, until

PROTECTED = ("head", "redis", "rollout", "learner")
"""Components whose last ready pod a drain must not evict: each has a disruption budget."""
SHORT = commands.DEADLINES["short"]
SETTLED_S = 60.0
"""How long a change that restarts nothing is watched."""


@dataclass(frozen=True)
class Drill:
    """`disturb`: what is done while the run trains, with the checks that belong to it."""

    name: str
    disturb: Callable[[Release, str], None]


def replaced(release: Release, component: str) -> None:
    """Delete the pods of a component; wait until another one is ready. Raises RehearsalError."""
    before = release.pods(component)
    if not before:
        raise RehearsalError(f"{component}: expected a pod")
    for pod in before:
        release.shell.output(commands.delete_pod(pod.name), SHORT)
    release.ready(component, other_than=frozenset(pod.uid for pod in before))


def delete_rollout(release: Release, run: str) -> None:
    """Another rollout pod takes over."""
    replaced(release, "rollout")


def delete_learner(release: Release, run: str) -> None:
    """All ranks restart, and an event says so."""
    replaced(release, "learner")
    wanted = "learner-restarted"
    until(f"the event {wanted}", READY_S, lambda: True if wanted in release.events(run) else None)


def delete_redis(release: Release, run: str) -> None:
    """All processes wait for it."""
    replaced(release, "redis")


def delete_head(release: Release, run: str) -> None:
    """The API answers throughout; it is another pod."""
    before = frozenset(pod.uid for pod in release.pods("head"))
    for pod in release.pods("head"):
        release.shell.output(commands.delete_pod(pod.name), SHORT)
    ends = time.monotonic() + READY_S
    while True:
        release.penstock("runs", "--json")
        if any(pod.ready and pod.uid not in before for pod in release.pods("head")):
            return
        if time.monotonic() > ends:
            raise RehearsalError(f"a ready pod of head: not within {READY_S:g} s")
        time.sleep(3)


def drain_node(release: Release, run: str) -> None:
    """The drain evicts what can move, and is blocked by the last pods of the components with a disruption budget."""
    node = release.ready("head")[0].node
    before = {pod.uid: pod for pod in release.pods() if pod.node == node}
    kept = {uid for uid, pod in before.items() if pod.component in PROTECTED and pod.ready}
    with ExitStack() as after:
        after.callback(release.shell.output, commands.uncordon(node), SHORT)
        status, _, errors = release.shell.outcome(commands.drain(node), SHORT)
        present = {pod.uid for pod in release.pods()}
    if missing := sorted(before[uid].name for uid in kept - present):
        raise RehearsalError(f"the drain of {node} evicted {', '.join(missing)}: expected budgets to prevent it")
    if status == 0 or "disruption budget" not in errors:
        raise RehearsalError(f"the drain of {node} has exit status {status}: expected a disruption budget to block it")
    say(f"the drain of {node} moved {len(before.keys() - present)} of {len(before)} pods")
    for component in ("api", "cpu", "verifier"):
        release.ready(component)


def raise_a_bound(release: Release, run: str) -> None:
    """An upgrade of bounds restarts nothing; watched for a minute, or until the run ends and its pods become idle."""
    before = {pod.uid: pod for component in ("api", *PROTECTED) for pod in release.pods(component)}
    release.shell.follow(upgrade(release, "rollout.maxReplicas=3"), commands.DEADLINES["install"])
    ends = time.monotonic() + SETTLED_S
    while time.monotonic() < ends and release.view(run)["state"] == "running":
        if missing := before.keys() - {pod.uid for pod in release.pods()}:
            names = ", ".join(sorted(before[uid].name for uid in missing))
            raise RehearsalError(f"an upgrade of a bound ended {names}: expected it to restart nothing")
        time.sleep(5)


def replace_all(release: Release, run: str) -> None:
    """An upgrade that changes all Ray pods: they drain, and the run continues on the new ones."""
    before = frozenset(pod.uid for component in ("head", "cpu") for pod in release.pods(component))
    release.shell.follow(upgrade(release, "logLevel=DEBUG"), commands.DEADLINES["install"])
    for component in ("head", "cpu"):
        release.ready(component, other_than=before)


def upgrade(release: Release, setting: str) -> list[str]:
    """The command that changes one value, for the installed Helm. Raises RehearsalError."""
    version = release.shell.output(commands.helm_version(), SHORT).strip()
    return commands.upgrade_chart(setting, force=not version.startswith("v3."))


DRILLS = (
    Drill("delete a rollout pod", delete_rollout),
    Drill("delete the learner's pod", delete_learner),
    Drill("delete the head", delete_head),
    Drill("delete Redis' pod", delete_redis),
    Drill("drain the node of the volume", drain_node),
    Drill("raise a bound by helm upgrade", raise_a_bound),
    Drill("replace all Ray pods by helm upgrade", replace_all),
)


def perform(release: Release, drill: Drill) -> str:
    """One drill, with a run of its own; returns what the run's counters say. Raises RehearsalError or EndedError."""
    run = release.start_run()
    with ExitStack() as after:
        after.callback(release.cancel, run)
        release.must_train(run)
        say(f"{drill.name}: {run} trains")
        drill.disturb(release, run)
        said = release.must_succeed(run)
        after.pop_all()
    return said


def uninstall(release: Release) -> str:
    """Uninstall the release: no pod and no Ray cluster is left, and the claims are. Raises RehearsalError."""
    release.shell.follow(commands.uninstall(), commands.DEADLINES["uninstall"])
    until("the end of all pods", READY_S, lambda: True if not release.pods() else None)
    if left := release.shell.output(commands.ray_clusters(), SHORT).split():
        raise RehearsalError(f"left after the uninstall: {', '.join(left)}")
    kept = {name.rpartition("/")[2] for name in release.shell.output(commands.claims(), SHORT).split()}
    if kept != set(commands.CLAIMS):
        raise RehearsalError(f"claims after the uninstall: {sorted(kept)}: expected {sorted(commands.CLAIMS)}")
    return f"no pod is left; kept: {', '.join(sorted(kept))}"
