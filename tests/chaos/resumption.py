"""Owns `resume --from` under load: its moment, its strikes, and when the run goes on from the older step.

Must not rewind anything itself; the sampler does.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable

import httpx
import redis

from tests.chaos import lookups, moments
from tests.chaos.lookups import key, message
from tests.chaos.scene import Moment, Scene
from tests.chaos.story import REWOUND
from tests.chaos.strikes import Strike, Struck, struck_now
from tests.harness.stack import exists, freeze, send

CANCELLED_S, RESUMED_S, REWINDING_S = 90.0, 60.0, 240.0
"""How long the run may take to be cancelled, to be accepted again, and to begin to rewind."""
POLL_S, SLICE_S = 0.1, 0.002
Cut = Callable[[Scene, int], bool]
"""Cuts a rewind off: kills what it needs, given the pid of the stopped sampler. False if that is gone."""


class NotResumedError(RuntimeError):
    """The run was cancelled and could not be resumed; the text has the API's answer."""


def resumable(scene: Scene) -> Moment | None:
    """A run with work in flight and a checkpoint of an older step."""
    found = moments.running(scene)
    older = older_checkpoints(scene) if found else []
    if found is None or not older:
        return None
    return Moment(None, None, found.leases, found.batch, found.sync, {"from_step": scene.rng.choice(older)})


def older_checkpoints(scene: Scene) -> list[int]:
    """The steps with a checkpoint that are older than the committed one, as the learner announces them."""
    stored, step = scene.server.get(key(scene.run, "checkpoints")), scene.step()
    return [known for known in json.loads(stored or b"[]") if known < step]


def resume_earlier(scene: Scene, moment: Moment) -> Struck | None:
    """Cancel the run with everything in flight, and resume it from the older step."""
    return _resume(scene, moment, None)


def cut_off(cut: Cut) -> Strike:
    """The same, and cut the rewind off while it has begun and not ended."""

    def strike(scene: Scene, moment: Moment) -> Struck | None:
        return _resume(scene, moment, cut)

    return strike


def _resume(scene: Scene, moment: Moment, cut: Cut | None) -> Struck | None:
    if not scene.resuming.acquire(blocking=False):
        return None
    try:
        step = int(moment.facts["from_step"])
        if step not in older_checkpoints(scene):  # another fault has rewound the run since
            return None
        struck = struck_now(scene, moment, facts={"steps_left": scene.step() - step})
        if not _cancelled(scene):
            return None
        older = older_checkpoints(scene)
        if step not in older:  # the learner wrote a newer one before it ended, and deleted this one
            step = moment.facts["from_step"] = max(older, default=0)
        _ask(scene, step)
    finally:
        scene.resuming.release()
    if cut is not None:
        struck.facts["cut_off"] = _cut_off(scene, cut, step)
        struck.had_effect = lambda: bool(struck.facts["cut_off"])
    return struck


def _cancelled(scene: Scene) -> bool:
    """Cancel the run and wait until it is; False if it succeeded before, or the episode is over."""
    ends = time.monotonic() + CANCELLED_S
    while time.monotonic() < ends:
        if (state := _state(scene)) == "cancelled":
            return True
        if state in ("succeeded", "failed") or scene.abandoned.is_set():
            return False
        _post(scene, "cancel")
        time.sleep(POLL_S)
    raise NotResumedError(f"{scene.run}: not cancelled within {CANCELLED_S:g} s")


def _ask(scene: Scene, step: int) -> None:
    ends, answer = time.monotonic() + RESUMED_S, "no answer"
    while time.monotonic() < ends:
        found = _post(scene, "resume", {"from_step": step})
        # An answer may be lost: what counts is the record.
        if _state(scene) not in ("cancelled", "?"):
            return
        answer = found.text if found is not None else answer
        time.sleep(POLL_S)
    raise NotResumedError(f"{scene.run}: not resumed from step {step} within {RESUMED_S:g} s: {answer}")


def _post(scene: Scene, verb: str, body: dict[str, int] | None = None) -> httpx.Response | None:
    """Ask the API; None if it does not answer, because another fault has hit it."""
    try:
        return scene.stack.api.post(f"/v1/runs/{scene.run}/{verb}", json=body)
    except httpx.TransportError:
        return None


def _state(scene: Scene) -> str:
    """The run's state; "?" while Redis does not answer."""
    try:
        return lookups.state(scene.server, scene.run)
    except redis.exceptions.RedisError:
        return "?"


def _cut_off(scene: Scene, cut: Cut, step: int) -> bool:
    """Stop the sampler in the middle of the rewind, and cut it off; False if the rewind ended before.

    A rewind of a small run takes a few milliseconds: once it may begin, the sampler runs in slices.
    """
    snapshot = key(scene.run, f"sampler-snapshot:{step}")
    ends = time.monotonic() + REWINDING_S
    while time.monotonic() < ends and not scene.ended():
        try:
            if rewound_since_resumed(scene):
                return False
            # The heartbeat of the cancelled run's sampler may still count.
            pids = {found.pid for found in lookups.processes(scene.server, scene.run, "sampler") if exists(found.pid)}
            if len(pids) != 1 or not (rewinding(scene) or scene.server.exists(snapshot)):
                time.sleep(POLL_S)
            elif freeze(sampler := pids.pop()):
                try:
                    if rewinding(scene):
                        return cut(scene, sampler)
                finally:
                    send(sampler, signal.SIGCONT)
                time.sleep(SLICE_S)
        except redis.exceptions.RedisError:
            time.sleep(POLL_S)  # another fault has hit Redis
    return False


def rewinding(scene: Scene) -> bool:
    """Whether the run is in the middle of a rewind."""
    return scene.server.hget(key(scene.run, "policy"), "rewinding") == b"1"


def rewound_since_resumed(scene: Scene) -> bool:
    """Whether the rewind of the newest resumption has ended."""
    done = scene.server.hget(key(scene.run, "policy"), "resumption")
    return done is not None and done == scene.server.hget(key(scene.run, "record"), "resumptions")


def kill_sampler(_: Scene, sampler: int) -> bool:
    """kill -9 of the sampler that rewinds."""
    return send(sampler, signal.SIGKILL)


def kill_redis(scene: Scene, _: int) -> bool:
    """kill -9 of the embedded server in the middle of the rewind."""
    pid = scene.stack.redis()
    return pid is not None and send(pid, signal.SIGKILL)


def resumed(scene: Scene, struck: Struck) -> bool:
    """The run was rewound, and has committed a step after the one from which it was resumed."""
    if scene.step() <= int(struck.moment.facts["from_step"]) or rewinding(scene):
        return False
    since = f"{int(struck.at * 1000)}-0"
    bodies = (message(fields) for _, fields in scene.server.xrange(key(scene.run, "events"), min=since))
    return any(body is not None and body.get("phase") == REWOUND for body in bodies) and bool(
        lookups.state(scene.server, scene.run) == "running"
    )
