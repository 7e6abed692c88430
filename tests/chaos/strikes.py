"""Owns the actions of faults on processes, connections, the disk, payloads and messages.

Must not touch a process of another stack. A strike returns None, without effect, if its victim holds nothing any more.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.damage import MESSAGES, PAYLOADS
from tests.chaos.ground import ProxyThread
from tests.chaos.lookups import BODY, Process, key, message
from tests.chaos.moments import confirmed
from tests.chaos.scene import Moment, Scene
from tests.harness.stack import exists, freeze, send

EFFECT_S = 30.0
"""How long a full disk lasts if no checkpoint fails."""
FILLER = ".filler"
CHUNK = bytes(64 * 1024)


@dataclass
class Struck:
    """An injected fault: its moment, its time (Unix seconds), and how many endings the run had at that time.

    `release` undoes it as soon as `due` is true. `entry`: the added entry, as (stream, id). `dead`: ids of killed
    processes. `facts`: more evidence; `had_effect`: after the recovery, whether the fault had an effect.
    """

    moment: Moment
    at: float
    endings: int
    step: int
    release: Callable[[], None] | None = None
    due: Callable[[], bool] = lambda: True
    entry: tuple[str, str] | None = None
    dead: frozenset[int] = frozenset()
    facts: dict[str, Any] = field(default_factory=dict)
    had_effect: Callable[[], bool] = lambda: True


Strike = Callable[[Scene, Moment], Struck | None]


def struck_now(scene: Scene, moment: Moment, **more: Any) -> Struck:
    """What is struck now, before it has an effect."""
    return Struck(moment, time.time(), scene.endings(), scene.step(), **more)


def kill(scene: Scene, moment: Moment) -> Struck | None:
    """kill -9 in the moment. The victim is stopped first, so that what it holds cannot change."""
    return _on_stopped(scene, moment, lambda pid, held: _killed(scene, pid, held))


def kill_ray(scene: Scene, moment: Moment) -> Struck | None:
    """kill -9 of Ray's head process. The gateway dies with it, a moment later; until then its answers do not count."""
    gateway = scene.stack.gateway()
    return _on_stopped(scene, moment, lambda pid, held: _killed(scene, pid, held, gateway))


def _killed(scene: Scene, pid: int, moment: Moment, with_it: int | None = None) -> Struck:
    struck = struck_now(scene, moment, dead=frozenset({pid, with_it} - {None}))
    send(pid, signal.SIGKILL)
    return struck


def stop(scene: Scene, moment: Moment) -> Struck | None:
    """SIGSTOP for one and a half to three leases, then SIGCONT."""
    seconds = scene.lease_s * scene.rng.uniform(1.5, 3.0)

    def stopped(pid: int, held: Moment) -> Struck:
        ends = time.monotonic() + seconds
        return struck_now(
            scene,
            held,
            release=lambda: _continue(pid),
            due=lambda: time.monotonic() >= ends,
            facts={"stopped_s": seconds},
        )

    return _on_stopped(scene, moment, stopped)


def _continue(pid: int) -> None:
    send(pid, signal.SIGCONT)


def _on_stopped(scene: Scene, moment: Moment, then: Callable[[int, Moment], Struck]) -> Struck | None:
    pid = moment.pid
    if pid is None or not exists(pid) or not freeze(pid):
        return None
    try:
        held = moment if moment.process is None else confirmed(scene, moment)
        if held is not None:
            return then(pid, held)
    except BaseException:  # Redis may be down: the victim must not stay stopped
        _continue(pid)
        raise
    _continue(pid)
    return None


def kill_redis(scene: Scene, moment: Moment) -> Struck | None:
    """kill -9 of the embedded server, without stopping it first: a stopped server cannot be queried."""
    assert moment.pid is not None
    struck = struck_now(scene, moment, dead=frozenset({moment.pid}))
    return struck if send(moment.pid, signal.SIGKILL) else None


def stop_redis(scene: Scene, moment: Moment) -> Struck | None:
    """SIGSTOP of the embedded server for longer than a lease."""
    pid, seconds = moment.pid, scene.lease_s * scene.rng.uniform(1.2, 2.0)
    assert pid is not None
    struck = struck_now(scene, moment, release=lambda: _continue(pid), facts={"stopped_s": seconds})
    ends = time.monotonic() + seconds
    struck.due = lambda: time.monotonic() >= ends
    return struck if freeze(pid) else None


def damage_checkpoint(scene: Scene, moment: Moment) -> Struck | None:
    """Flip one bit of the newest checkpoint, and kill -9 the learner, which has to resume from an older one."""
    folder = scene.folder / "checkpoints" / str(moment.facts["checkpoint"])

    def damaged(pid: int, held: Moment) -> Struck:
        if not flip_a_bit(folder, scene.rng.random()):
            _continue(pid)
            return struck_now(scene, held, had_effect=lambda: False)
        struck = _killed(scene, pid, held)
        struck.had_effect = lambda: _event_reports(scene, folder.name, "checkpoint-damaged")
        return struck

    return _on_stopped(scene, moment, damaged)


def flip_a_bit(folder: Path, where: float) -> bool:
    """Flip a bit of the checkpoint's largest file, at the fraction `where` of its length; False if it is gone."""
    try:
        path = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        with path.open("r+b") as file:
            offset = int(where * (path.stat().st_size - 1))
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
    except (OSError, ValueError):
        return False
    return True


def _event_reports(scene: Scene, word: str, phase: str | None = None, since: str = "-") -> bool:
    """Whether an event (of `phase`, after entry `since`) has `word` in its text."""
    for _, fields in scene.server.xrange(key(scene.run, "events"), min=since):
        body = message(fields)
        if body and word in body.get("text", "") and phase in (None, body.get("phase")):
            return True
    return False


def fill_disk(scene: Scene, moment: Moment) -> Struck | None:
    """Fill the checkpoints' disk to the last byte until a checkpoint has failed because of it."""
    filler = scene.folder / "checkpoints" / FILLER
    since = f"({_last_event(scene)}"
    _fill(filler)
    ends = time.monotonic() + EFFECT_S

    def failed() -> bool:
        return _event_reports(scene, "", "checkpoint-failed", since)

    return struck_now(
        scene,
        moment,
        release=lambda: filler.unlink(missing_ok=True),
        had_effect=failed,
        due=lambda: failed() or time.monotonic() >= ends,
    )


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        for chunk in (CHUNK, b"\0"):
            try:
                while True:
                    file.write(chunk)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def _last_event(scene: Scene) -> str:
    found = scene.server.xrevrange(key(scene.run, "events"), count=1)
    return found[0][0].decode() if found else "0-0"


def _proxy(scene: Scene) -> ProxyThread:
    assert scene.ground.proxy is not None, "this fault needs a proxy"
    return scene.ground.proxy


def drop_connections(scene: Scene, moment: Moment) -> Struck | None:
    """Cut every connection to Redis, one to four times in a row."""
    struck = struck_now(scene, moment)
    times = scene.rng.randint(1, 4)
    for _ in range(times):
        struck.facts["dropped"] = struck.facts.get("dropped", 0) + _proxy(scene).drop()
        time.sleep(scene.rng.uniform(0.05, 0.6))
    return struck


def delay_connections(scene: Scene, moment: Moment) -> Struck | None:
    """Delay every byte to and from Redis for a while, by 10 ms to 3 s."""
    seconds, lasting = 10 ** scene.rng.uniform(-2.0, 0.5), scene.rng.uniform(2.0, 4.0) * scene.lease_s
    ends = time.monotonic() + lasting
    _proxy(scene).delay(seconds)
    return struck_now(
        scene,
        moment,
        release=lambda: _proxy(scene).delay(0.0),
        due=lambda: time.monotonic() >= ends,
        facts={"delay_s": seconds, "lasting_s": lasting},
    )


def swallow_connections(scene: Scene, moment: Moment) -> Struck | None:
    """Make every connection to Redis hang, open but without traffic, as behind a router that lost its state."""
    struck = struck_now(scene, moment)
    struck.facts["swallowed"] = _proxy(scene).swallow()
    return struck


def refuse_connections(scene: Scene, moment: Moment) -> Struck | None:
    """Cut every connection to Redis, and refuse new ones for half a lease to two leases."""
    seconds = scene.lease_s * scene.rng.uniform(0.5, 2.0)
    struck = struck_now(scene, moment, facts={"refused_s": seconds})
    _proxy(scene).refuse(seconds)
    struck.facts["dropped"] = _proxy(scene).drop()
    return struck


def damage_payload(scene: Scene, moment: Moment) -> Struck | None:
    """Overwrite a field of one payload; None if it was released meanwhile."""
    name = str(moment.facts["payload"])
    how = scene.rng.choice(sorted(PAYLOADS))
    struck = struck_now(scene, moment, facts={"how": how})
    return struck if PAYLOADS[how](scene.server, name, scene.rng) else None


def duplicate_message(scene: Scene, moment: Moment) -> Struck | None:
    """Append a copy of an entry under lease."""
    return _append(scene, moment, moment.facts["body"])


def damage_message(scene: Scene, moment: Moment) -> Struck | None:
    """Append a damaged copy of an entry under lease."""
    how = scene.rng.choice(sorted(MESSAGES))
    struck = _append(scene, moment, MESSAGES[how](moment.facts["body"], scene.rng))
    struck.facts["how"] = how
    return struck


def _append(scene: Scene, moment: Moment, body: bytes) -> Struck:
    stream = str(moment.facts["stream"])
    struck = struck_now(scene, replace(moment, facts={"stream": stream, "of": moment.facts["entry"]}))
    entry = scene.server.xadd(key(scene.run, stream), {BODY: body}).decode()
    struck.entry = (stream, entry)
    scene.injected.append(struck.entry)
    return struck


def same(process: Process, struck: Struck) -> bool:
    """Whether a process was killed, or is a replica whose engine core was killed."""
    return process.pid in struck.dead or (bool(struck.dead) and process.id == struck.moment.process)
