"""Owns the oracle's checks of groups: each is dispatched, judged and ended once, and none is lost.

Must not import the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.evidence import Entry
from tests.chaos.finding import Finding, Kind
from tests.chaos.lookups import LANES
from tests.chaos.story import GroupSize, Story

RELEASED = ("filtered", "stale", "dead")
OPEN = ("pending", "kept", "batched", "reopened")
TOMBSTONES = 512
"""How many released groups keep their hash (docs/reference/api.md, "Dead letters"); older hashes may be deleted."""
NOTICED_S = 60.0
"""How long the sampler may take to end a dead-lettered group; a killed or stopped sampler is replaced by then."""


def every_group_is_accounted_for(story: Story) -> Iterator[Finding]:
    """Each dispatched training group was trained, or released, or is counted as pending: exactly one of these."""
    evidence = story.evidence
    pending = evidence.lanes["train"].pending
    for name in story.dispatched("train"):
        state = evidence.groups.get(name, {}).get("state")
        trained = name in story.trained
        if name in story.orphaned:
            # It may be counted as dead, but its messages in flight were lost.
            wrong: str | bool = story.orphaned[name]
        elif trained and state in (None, "trained"):
            wrong = name in pending and "trained, but counted as pending"
        elif trained:
            wrong = f"trained by a step, but its state is {state!r}"
        elif state in RELEASED:
            wrong = name in pending and f"released as {state}, but counted as pending"
        elif state in OPEN:
            wrong = name not in pending and f"its state is {state!r}, but it is not counted as pending"
        elif state is None:
            ended = _hash_may_be_deleted(story) and story.ending(name)
            wrong = not ended and "dispatched, but no record of it is left"
        else:
            wrong = f"its state is {state!r}, but no step of the history has it"
        if wrong:
            yield Finding(Kind.LOST, name, wrong)


def _hash_may_be_deleted(story: Story) -> bool:
    counters = story.evidence.lanes["train"].counters
    return sum(counters.get(name, 0) for name in (*RELEASED, "trained")) > TOMBSTONES


def every_prompt_was_answered(story: Story) -> Iterator[Finding]:
    """Each evaluation group was judged or dead-lettered, is pending, or belongs to a recorded evaluation."""
    evidence = story.evidence
    recorded = {(record["set"], record["name"]) for record in evidence.evaluations}
    pending = evidence.lanes["evaluation"].pending
    for name in sorted(story.evaluated_again):
        state = evidence.groups.get(name, {}).get("state")
        _, which, when, _ = name.split(".")
        if state not in ("evaluated", "dead") and name not in pending and (which, when) not in recorded:
            yield Finding(Kind.LOST, name, f"a prompt of an evaluation without a record; its state is {state!r}")
    for record in evidence.evaluations:
        prefix = f"e.{record['set']}.{record['name']}."
        lettered = [name for name in story.letters if name.startswith(prefix)]
        if record["dropped"] > len(lettered):
            text = f"{record['dropped']} prompts were dropped, {len(lettered)} dead letters are stored"
            yield Finding(Kind.LOST, prefix.strip("."), text)


def nothing_is_stranded(story: Story) -> Iterator[Finding]:
    """A group that counts as pending must have a message in flight that will end it."""
    evidence = story.evidence
    for lane, prefix in LANES.items():
        sizes = story.dispatched(lane)
        for name in sorted(evidence.lanes[lane].pending):
            state = evidence.groups.get(name, {}).get("state")
            if name not in sizes:
                yield Finding(Kind.COUNTERS, name, f"counted as pending in lane {lane}, but never dispatched")
            elif state == "batched" and evidence.state == "succeeded":
                yield Finding(Kind.LOST, name, "in a batch, but the run succeeded without it")
            elif state == "pending" and (why := _stranded(story, lane, prefix, name, sizes[name])):
                yield Finding(Kind.LOST, name, f"pending forever: {why}")


def _stranded(story: Story, lane: str, prefix: str, name: str, size: GroupSize) -> str | None:
    """Why no message will end a pending group; None if one will."""
    evidence = story.evidence
    # A rewind restarts the streams: earlier messages and letters do not count for a group dispatched again.
    life = len(story.rewinds)
    if letters := [letter for letter in evidence.own("dead") if _ends(letter, name) and story.life(letter) >= life]:
        unnoticed_s = (_sampled_until(story, lane) - letters[0].order[0]) / 1000
        return (
            f"it was dead-lettered {unnoticed_s:.0f} s before the end, but not released"
            if unnoticed_s > NOTICED_S
            else None
        )

    def waiting(stream: str) -> set[int | None]:
        """The group's unacked entries of a stream: sample indices, None for a task."""
        found = [entry for entry in evidence.entries[stream] if entry.id in evidence.unacked[stream] and entry.body]
        return {entry.body.get("index") for entry in found if entry.body and entry.body.get("group") == name}

    def announced(stream: str) -> set[int]:
        return {
            body["index"] for at, body in story.messages(f"{prefix}{stream}") if body["group"] == name and at >= life
        }

    published, judged = announced("samples"), announced("verdicts")
    recorded = {int(field.removeprefix("verdict:")) for field in evidence.groups[name] if field.startswith("verdict:")}
    missing = set(range(size.wanted)) - published
    if missing and not waiting(f"{prefix}tasks"):
        return f"samples {sorted(missing)} were never generated, but its task was acked"
    if unjudged := (published & set(range(size.wanted))) - judged - waiting(f"{prefix}samples"):
        return f"samples {sorted(unjudged)} were never judged, but are acked"
    if unrecorded := judged - recorded - waiting(f"{prefix}verdicts"):
        return f"verdicts {sorted(unrecorded)} were never recorded, but are acked"
    if not missing and recorded >= set(range(size.wanted)):
        return "all of its verdicts are recorded, but there is no decision on it"
    return None


def _ends(letter: Entry, name: str) -> bool:
    """Whether a dead letter ends the group. The letter of an invalid message ends nothing."""
    return letter.body is not None and letter.body.get("group") == name and letter.body["cause"] != "invalid"


def _sampled_until(story: Story, lane: str) -> int:
    """When the sampler last served the lane's groups (ms): at the run's end; for training, at the last step."""
    evidence = story.evidence
    if lane == "train" and evidence.state == "succeeded" and evidence.entries["steps"]:
        return max(entry.order for entry in evidence.entries["steps"])[0]
    return max(entry.order for entries in evidence.entries.values() for entry in entries)[0]


def nothing_is_duplicated(story: Story) -> Iterator[Finding]:
    """In each life a group is dispatched once, and each of its samples is announced and judged once."""
    for prefix in LANES.values():
        seen: dict[tuple[int, str], list[int | None]] = {}
        for life, body in story.messages(f"{prefix}tasks"):
            stops = seen.setdefault((life, body["group"]), [])
            # A screened group's second task asks for the rest of its samples.
            if stops and (stops[-1] is None or body.get("stop") is not None):
                yield Finding(Kind.DUPLICATED, body["group"], f"dispatched {len(stops) + 1} times")
            stops.append(body.get("stop"))
        for stream, verb in ((f"{prefix}samples", "announced"), (f"{prefix}verdicts", "judged")):
            yield from _each_once(story, stream, verb)


def _each_once(story: Story, stream: str, verb: str) -> Iterator[Finding]:
    seen: set[tuple[int, str, int]] = set()
    for life, body in story.messages(stream):
        sample = (life, body["group"], body["index"])
        if sample in seen:
            yield Finding(Kind.DUPLICATED, body["group"], f"sample {body['index']} was {verb} more than once")
        seen.add(sample)


def groups_were_judged_by_the_rule(story: Story) -> Iterator[Finding]:
    """Each group ended as the rule requires: kept if 0 < correct < known, otherwise not trained."""
    # A group without a hash has only its verdicts: `ending` uses them.
    accepted = {"trained": {"kept"}, "stale": {"kept"}, "kept": {"kept"}, "batched": {"kept"}, "filtered": {"filtered"}}
    screened = story.evidence.recipe["algorithm"]["dynamic_sampling"].get("selection", {}).get("strategy") == "screen"
    for name, size in story.dispatched("train").items():
        state = story.evidence.groups.get(name, {}).get("state")
        state = "trained" if name in story.trained else state
        decision = story.decision(name, size)
        if state == "dead" and decision != "dead" and name not in story.letters:
            yield Finding(Kind.RULE, name, f"dead, but by its verdicts {decision}, and it has no dead letter")
        if state == "filtered" and screened:
            continue
        if state in accepted and decision not in accepted[state]:
            yield Finding(Kind.RULE, name, f"{state}, but by its verdicts {decision}")


def only_what_was_injected_is_invalid(story: Story) -> Iterator[Finding]:
    """No message that the run itself wrote was rejected as invalid."""
    for letter in story.evidence.bodies("dead"):
        stream = letter["stream"].split("}:")[-1]
        if letter["cause"] == "invalid" and letter["entry"] not in story.evidence.injected.get(stream, ()):
            yield Finding(Kind.RULE, f"{stream} {letter['entry']}", f"rejected: {letter['reason']}")


def counters_reconcile(story: Story) -> Iterator[Finding]:
    """Redis' counters match the streams, and they add up."""
    evidence = story.evidence
    for lane, endings in (("train", ("trained", *RELEASED)), ("evaluation", ("evaluated", "dead"))):
        counters, pending = evidence.lanes[lane].counters, evidence.lanes[lane].pending
        counted = {name: counters.get(name, 0) for name in ("dispatched", *endings)}
        # A rewind starts to count the evaluation lane from 0.
        seen = len(story.dispatched(lane) if lane == "train" else story.evaluated_again)
        if counted["dispatched"] != seen:
            yield Finding(
                Kind.COUNTERS, lane, f"{counted['dispatched']} groups counted as dispatched, the tail has {seen} tasks"
            )
        if counted["dispatched"] != sum(counted[name] for name in endings) + len(pending):
            yield Finding(Kind.COUNTERS, lane, f"{counted} with {len(pending)} pending do not add up")
    counters = evidence.lanes["train"].counters
    seen_trained = sum(len(steps) for steps in story.trained.values())
    if counters.get("trained", 0) != seen_trained:
        text = f"{counters.get('trained', 0)} groups counted as trained, the steps name {seen_trained}"
        yield Finding(Kind.COUNTERS, "train", text)
    endings = [story.ending(name) for name in story.dispatched("train")]
    for name in RELEASED:
        if counters.get(name, 0) != endings.count(name):
            text = f"{counters.get(name, 0)} groups counted as {name}, {endings.count(name)} expected"
            yield Finding(Kind.COUNTERS, "train", text)
