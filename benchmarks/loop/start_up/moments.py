"""Owns the moments of a start: what a run's events, states and first step say of when each part was ready.

Must not start or ask anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from penstock_client.models import RolloutStep, Run, RunEvent

READY, SUBMITTED, ASKED, PREPARED = "stack ready", "submitted", "services asked for", "model prepared"
SAMPLER, LEARNER, ENGINE, HELD = "sampler ready", "learner ready", "engine up", "first version held"
RESPONSE, UPDATE = "first response", "first update"
ORDER = (READY, SUBMITTED, ASKED, PREPARED, SAMPLER, LEARNER, ENGINE, HELD, RESPONSE, UPDATE)
"""The moments, about in the order in which they come."""
EVENTS = {
    ASKED: ("controller", "starting-services"),
    PREPARED: ("controller", "model-prepared"),
    SAMPLER: ("sampler", "data-loaded"),
    LEARNER: ("learner", "ready"),
    ENGINE: ("rollout", "rollout-joining"),
}
"""The moments that are events: service and phase."""
PART = re.compile(r"([a-z]+) (\d+(?:\.\d+)?) s\b")

Moments = Mapping[str, float]
"""Seconds since the stack was started, by the name of the moment."""


class IncompleteStartError(RuntimeError):
    """What was read of a start lacks moments; the text names them."""


def moments_of(started: float, ready: float, submitted: float, run: Run, first: RolloutStep) -> dict[str, float]:
    """The moments of a start. `started`, `ready`, `submitted`: Unix seconds. `first`: the first rollout step.

    A release that starts services only once the model is prepared has no event for that; it is then the moment at
    which they are asked for. Raises IncompleteStartError.
    """
    extra = first.model_extra or {}
    found = {READY: ready, SUBMITTED: submitted} | {
        name: event.at for name, of in EVENTS.items() if (event := event_of(run.events, *of))
    }
    if ASKED in found:
        found.setdefault(PREPARED, found[ASKED])
    if running := [change.at for change in run.history if change.state == "running"]:
        found[HELD] = running[0]
    if "generation_started_at" in extra:
        found[RESPONSE] = float(extra["generation_started_at"])
    found[UPDATE] = first.learning_finished_at
    if missing := [name for name in ORDER if name not in found]:
        raise IncompleteStartError(f"run {run.id} does not say when: {', '.join(missing)}")
    return {name: found[name] - started for name in ORDER}


def event_of(events: Iterable[RunEvent], service: str, phase: str) -> RunEvent | None:
    """The first event of a service and phase."""
    return next((event for event in events if (event.service, event.phase) == (service, phase)), None)


def engine_parts(events: Sequence[RunEvent]) -> dict[str, float]:
    """The seconds of each part of the engine's start, as its event says; empty for a release that does not."""
    event = event_of(events, *EVENTS[ENGINE])
    return {name: float(seconds) for name, seconds in PART.findall(event.text if event else "")}


def phases(moments: Moments) -> dict[str, float]:
    """The seconds of the phases of a start, by name. Services start side by side, so that theirs overlap."""
    spans = {
        "`penstock up` until the stack is ready": (None, READY),
        "submitted until the model is prepared": (SUBMITTED, PREPARED),
        "submitted until the sampler is ready": (SUBMITTED, SAMPLER),
        "submitted until the learner is ready": (SUBMITTED, LEARNER),
        "services asked for until the engine is up": (ASKED, ENGINE),
        "model prepared until the engine is up": (PREPARED, ENGINE),
        "engine up until the first version is held": (ENGINE, HELD),
        "first version held until the first response": (HELD, RESPONSE),
        "first response until the first update": (RESPONSE, UPDATE),
        "submitted until the engine is up": (SUBMITTED, ENGINE),
        "submitted until the first response": (SUBMITTED, RESPONSE),
        "`penstock up` until the first response": (None, RESPONSE),
        "`penstock up` until the first update": (None, UPDATE),
    }
    return {name: moments[end] - (moments[start] if start else 0.0) for name, (start, end) in spans.items()}


def engine_share(moments: Moments) -> float:
    """The seconds from the request for services to the engine, of those from `penstock up` to the first response."""
    return (moments[ENGINE] - moments[ASKED]) / moments[RESPONSE]
