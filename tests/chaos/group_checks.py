"""Owns the oracle's checks of groups: each dispatched once, answered once, ended once, and none forgotten.

Must not import the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.evidence import Entry
from tests.chaos.finding import Finding, Kind
from tests.chaos.lookups import LANES
from tests.chaos.story import Asked, Story

RELEASED = ("filtered", "stale", "dead")
OPEN = ("pending", "kept", "batched")
TOMBSTONES = 512
"""Released groups whose hash is still there (docs/api.md, "Dead letters"); older ones may be gone."""
HEARD_S = 60.0
"""How long a sampler may take to end a group that was given up: one that was killed or stopped is replaced by then."""


def every_group_has_its_place(story: Story) -> Iterator[Finding]:
    """Each dispatched training group was trained, released, or is counted as pending; one of these."""
    evidence = story.evidence
    pending = evidence.lanes["train"].pending
    for name in story.dispatched("train"):
        state = evidence.groups.get(name, {}).get("state")
        trained = name in story.trained
        if name in story.orphaned:
            # Counted as dead it may be; but what was on its way to it has been lost.
            wrong: str | bool = story.orphaned[name]
        elif trained and state in (None, "trained"):
            wrong = name in pending and "trained, and yet counted as pending"
        elif trained:
            wrong = f"a step names it as trained, its state is {state!r}"
        elif state in RELEASED:
            wrong = name in pending and f"released as {state}, and yet counted as pending"
        elif state in OPEN:
            wrong = name not in pending and f"its state is {state!r}, but nobody counts it as pending"
        elif state is None:
            ended = _may_be_buried(story) and story.ending(name)
            wrong = not ended and "dispatched, and nothing is known of it any more"
        else:
            wrong = f"its state is {state!r}, and no step of the history names it"
        if wrong:
            yield Finding(Kind.LOST, name, wrong)


def _may_be_buried(story: Story) -> bool:
    counters = story.evidence.lanes["train"].counters
    return sum(counters.get(name, 0) for name in (*RELEASED, "trained")) > TOMBSTONES


def every_prompt_was_answered(story: Story) -> Iterator[Finding]:
    """Each evaluation group was judged or given up, is pending, or belongs to an evaluation that is on record."""
    evidence = story.evidence
    recorded = {(record["set"], record["name"]) for record in evidence.bodies("evaluations")}
    pending = evidence.lanes["evaluation"].pending
    for name in story.dispatched("evaluation"):
        state = evidence.groups.get(name, {}).get("state")
        _, which, when, _ = name.split(".")
        if state not in ("evaluated", "dead") and name not in pending and (which, when) not in recorded:
            yield Finding(Kind.LOST, name, f"an evaluation's prompt, and its state is {state!r}")
    for record in evidence.bodies("evaluations"):
        prefix = f"e.{record['set']}.{record['name']}."
        given_up = [name for name in story.letters if name.startswith(prefix)]
        if record["dropped"] > len(given_up):
            text = f"{record['dropped']} prompts were dropped, {len(given_up)} dead letters tell why"
            yield Finding(Kind.LOST, prefix.strip("."), text)


def nothing_is_stranded(story: Story) -> Iterator[Finding]:
    """A group that counts as pending must have something on its way that will end it."""
    evidence = story.evidence
    for lane, prefix in LANES.items():
        asked = story.dispatched(lane)
        for name in sorted(evidence.lanes[lane].pending):
            state = evidence.groups.get(name, {}).get("state")
            if name not in asked:
                yield Finding(Kind.COUNTERS, name, f"counted as pending in lane {lane}, and was never dispatched")
            elif state == "batched" and evidence.state == "succeeded":
                yield Finding(Kind.LOST, name, "in a batch that the run succeeded without")
            elif state == "pending" and (why := _stranded(story, lane, prefix, name, asked[name])):
                yield Finding(Kind.LOST, name, f"pending for ever: {why}")


def _stranded(story: Story, lane: str, prefix: str, name: str, asked: Asked) -> str | None:
    """Why nothing will ever end a pending group; None when something will."""
    evidence = story.evidence
    # A rewind began the training streams anew: what was on them, or given up, says nothing of a group asked for again.
    life = len(story.rewinds) if lane == "train" else 0
    if letters := [letter for letter in evidence.own("dead") if _ends(letter, name) and story.life(letter) >= life]:
        unheard_s = (_sampled_until(story, lane) - letters[0].order[0]) / 1000
        return f"it was given up {unheard_s:.0f} s before the end, and not ended" if unheard_s > HEARD_S else None

    def waiting(stream: str) -> set[int | None]:
        """What of the group a consumer still has to deal with on a stream: indices, None for a task."""
        found = [entry for entry in evidence.entries[stream] if entry.id in evidence.unacked[stream] and entry.body]
        return {entry.body.get("index") for entry in found if entry.body and entry.body.get("group") == name}

    def told(stream: str) -> set[int]:
        return {body["index"] for at, body in story.told(f"{prefix}{stream}") if body["group"] == name and at >= life}

    published, judged = told("samples"), told("verdicts")
    recorded = {int(field.removeprefix("verdict:")) for field in evidence.groups[name] if field.startswith("verdict:")}
    missing = set(range(asked.wanted)) - published
    if missing and not waiting(f"{prefix}tasks"):
        return f"samples {sorted(missing)} were never drawn, and its task was acked"
    if unjudged := (published & set(range(asked.wanted))) - judged - waiting(f"{prefix}samples"):
        return f"samples {sorted(unjudged)} were never judged, and are acked"
    if unheard := judged - recorded - waiting(f"{prefix}verdicts"):
        return f"verdicts {sorted(unheard)} were never recorded, and are acked"
    if not missing and recorded >= set(range(asked.wanted)):
        return "all of its verdicts are recorded, and nobody decided"
    return None


def _ends(letter: Entry, name: str) -> bool:
    """Whether a dead letter ends the group. A message that was no message of this run ends nothing."""
    return letter.body is not None and letter.body.get("group") == name and letter.body["cause"] != "invalid"


def _sampled_until(story: Story, lane: str) -> int:
    """Until when the lane's groups were looked after (ms): until the run's end, in training until its last step."""
    evidence = story.evidence
    if lane == "train" and evidence.state == "succeeded" and evidence.entries["steps"]:
        return max(entry.order for entry in evidence.entries["steps"])[0]
    return max(entry.order for entries in evidence.entries.values() for entry in entries)[0]


def nothing_came_twice(story: Story) -> Iterator[Finding]:
    """Of each life: a group is dispatched once, and each of its samples announced and judged once."""
    for prefix in LANES.values():
        seen: dict[tuple[int, str], list[int | None]] = {}
        for life, body in story.told(f"{prefix}tasks"):
            stops = seen.setdefault((life, body["group"]), [])
            # A screened group's second task asks for the rest of it.
            if stops and (stops[-1] is None or body.get("stop") is not None):
                yield Finding(Kind.DUPLICATED, body["group"], f"dispatched {len(stops) + 1} times")
            stops.append(body.get("stop"))
        for stream, verb in ((f"{prefix}samples", "announced"), (f"{prefix}verdicts", "judged")):
            yield from _each_once(story, stream, verb)


def _each_once(story: Story, stream: str, verb: str) -> Iterator[Finding]:
    seen: set[tuple[int, str, int]] = set()
    for life, body in story.told(stream):
        sample = (life, body["group"], body["index"])
        if sample in seen:
            yield Finding(Kind.DUPLICATED, body["group"], f"sample {body['index']} was {verb} more than once")
        seen.add(sample)


def groups_were_judged_by_the_rule(story: Story) -> Iterator[Finding]:
    """How a group ended is what its verdicts make of it: 0 < correct < known is kept, all else is not trained."""
    # Of a group whose hash is gone the verdicts are all there is: `ending` goes by them.
    accepted = {"trained": {"kept"}, "stale": {"kept"}, "kept": {"kept"}, "batched": {"kept"}, "filtered": {"filtered"}}
    screened = story.evidence.recipe["algorithm"]["dynamic_sampling"].get("selection", {}).get("strategy") == "screen"
    for name, asked in story.dispatched("train").items():
        state = story.evidence.groups.get(name, {}).get("state")
        state = "trained" if name in story.trained else state
        decision = story.decision(name, asked)
        if state == "dead" and decision != "dead" and name not in story.letters:
            yield Finding(Kind.RULE, name, f"dead, but its verdicts make it {decision}, and no letter tells why")
        if state == "filtered" and screened:
            continue
        if state in accepted and decision not in accepted[state]:
            yield Finding(Kind.RULE, name, f"{state}, but its verdicts make it {decision}")


def only_what_was_injected_is_invalid(story: Story) -> Iterator[Finding]:
    """No message that the run itself wrote was refused as none of its own."""
    for letter in story.evidence.bodies("dead"):
        stream = letter["stream"].split("}:")[-1]
        if letter["cause"] == "invalid" and letter["entry"] not in story.evidence.injected.get(stream, ()):
            yield Finding(Kind.RULE, f"{stream} {letter['entry']}", f"refused: {letter['reason']}")


def counters_reconcile(story: Story) -> Iterator[Finding]:
    """What Redis counts is what the streams show, and it adds up."""
    evidence = story.evidence
    for lane, endings in (("train", ("trained", *RELEASED)), ("evaluation", ("evaluated", "dead"))):
        counters, pending = evidence.lanes[lane].counters, evidence.lanes[lane].pending
        told = {name: counters.get(name, 0) for name in ("dispatched", *endings)}
        seen = len(story.dispatched(lane))
        if told["dispatched"] != seen:
            yield Finding(Kind.COUNTERS, lane, f"{told['dispatched']} groups counted as dispatched, {seen} tasks seen")
        if told["dispatched"] != sum(told[name] for name in endings) + len(pending):
            yield Finding(Kind.COUNTERS, lane, f"{told} with {len(pending)} pending do not add up")
    counters = evidence.lanes["train"].counters
    seen_trained = sum(len(steps) for steps in story.trained.values())
    if counters.get("trained", 0) != seen_trained:
        text = f"{counters.get('trained', 0)} groups counted as trained, the steps name {seen_trained}"
        yield Finding(Kind.COUNTERS, "train", text)
    endings = [story.ending(name) for name in story.dispatched("train")]
    for name in RELEASED:
        if counters.get(name, 0) != endings.count(name):
            text = f"{counters.get(name, 0)} groups counted as {name}, {endings.count(name)} are"
            yield Finding(Kind.COUNTERS, "train", text)
