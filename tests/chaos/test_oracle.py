"""The oracle on a synthetic run: a clean run passes, and every violation is found under its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos import synthetic
from tests.chaos.evidence import Entry, Evidence
from tests.chaos.finding import Kind
from tests.chaos.oracle import CHECKS, judge
from tests.chaos.synthetic import (
    FILTERED,
    KEPT,
    PENDING,
    PROMPTS,
    STALE,
    append,
    batch,
    clean_run,
    rewound_run,
    sample,
    task,
    verdict,
)

LATER = "9000-0"
LETTER = {"kind": "dead", "stream": "penstock:{run}:tasks", "reason": "not a valid Task", "group": None}


def test_a_clean_run_has_no_finding():
    judgement = judge(clean_run())
    assert judgement.findings == ()
    assert (judgement.lost, judgement.duplicated) == (0, 0)
    assert judgement.figures["dispatched"] == 8
    assert judgement.figures["trained"] == 4


def lose_a_hash(run: Evidence) -> None:
    del run.groups[FILTERED]


def lose_a_pending_group(run: Evidence) -> None:
    run.lanes["train"].pending.remove(PENDING)


def lose_a_task(run: Evidence) -> None:
    run.unacked["tasks"].clear()


def lose_a_sample(run: Evidence) -> None:
    for index in range(synthetic.SAMPLES):
        append(run, "samples", sample(PENDING, index), f"{9000 + index}-0")


def lose_a_verdict(run: Evidence) -> None:
    lose_a_sample(run)
    for index in range(synthetic.SAMPLES):
        append(run, "verdicts", verdict(PENDING, index, "correct"), f"{9100 + index}-0")


def forget_to_decide(run: Evidence) -> None:
    lose_a_verdict(run)
    run.groups[PENDING] |= {f"verdict:{index}": "{}" for index in range(synthetic.SAMPLES)}


def dead_letter(run: Evidence, entry: str, group: str = PENDING) -> None:
    """The group's task is in the dead letters."""
    run.unacked["tasks"].clear()
    append(run, "dead", {**LETTER, "cause": "deliveries", "group": group, "entry": "1-0"}, entry)


def train_the_last_step_at(run: Evidence, seconds: int) -> None:
    run.entries["steps"][-1] = Entry(f"{seconds * 1000}-0", run.entries["steps"][-1].body)


def forget_a_dead_letter(run: Evidence) -> None:
    dead_letter(run, LATER)
    train_the_last_step_at(run, 90)


def forget_a_dead_letter_in_a_run_that_hangs(run: Evidence) -> None:
    run.state = "cancelled"
    dead_letter(run, LATER)
    append(run, "events", {"phase": "stalled", "text": "no verdict comes"}, "90000-0")


def forget_in_a_long_run(run: Evidence) -> None:
    """Hashes of old groups may be deleted in a long run, but only after the groups have ended."""
    run.lanes["train"].counters |= {"filtered": 1000, "dispatched": 1007}
    run.lanes["train"].pending.remove(PENDING)
    del run.groups[PENDING]


def lose_a_trained_group(run: Evidence) -> None:
    run.groups["g9"] = {"state": "trained"}
    append(run, "tasks", task("g9"), LATER)


def leave_a_batch_behind(run: Evidence) -> None:
    run.groups[KEPT]["state"] = "batched"


def lose_a_prompt(run: Evidence) -> None:
    append(run, "evaluation:tasks", task("e.held-out.after.000000"), LATER)


def orphan_a_group(run: Evidence) -> None:
    run.groups[STALE]["state"] = "dead"
    run.lanes["train"].counters |= {"stale": 0, "dead": 1}
    append(run, "events", {"phase": "group-orphaned", "text": f"{STALE}: its messages are gone"}, LATER)


def drop_a_prompt_without_a_letter(run: Evidence) -> None:
    run.evaluations[0].update(prompts=1, dropped=1)


def train_in_two_steps(run: Evidence) -> None:
    run.steps[1]["groups"][1] = "g0"


def train_twice_in_one_step(run: Evidence) -> None:
    run.steps[1]["groups"].append("g3")


def judge_twice(run: Evidence) -> None:
    append(run, "verdicts", verdict("g0", 0, "wrong"), LATER)


def judge_a_prompt_twice(run: Evidence) -> None:
    append(run, "evaluation:verdicts", verdict(PROMPTS[0], 0, "wrong"), LATER)


def announce_twice(run: Evidence) -> None:
    append(run, "samples", sample("g0", 1), LATER)


def dispatch_twice(run: Evidence) -> None:
    append(run, "tasks", task("g0"), LATER)


def publish_another_batch(run: Evidence) -> None:
    append(run, "batches", batch(2, ("g2", KEPT), last=True), LATER)


def put_a_group_into_two_batches(run: Evidence) -> None:
    append(run, "batches", batch(3, ("g0",), last=True), LATER)


def evaluate_twice(run: Evidence) -> None:
    run.evaluations *= 2


def miss_an_entry(run: Evidence) -> None:
    run.added["events"] += 1


def forget_an_entry(run: Evidence) -> None:
    run.added["samples"] -= 1


def break_the_tail(run: Evidence) -> None:
    run.added["tasks"] = -1


def count_wrongly(run: Evidence) -> None:
    run.lanes["train"].counters["filtered"] += 1


def count_one_too_many(run: Evidence) -> None:
    run.lanes["train"].counters["dispatched"] += 1


def count_a_stranger(run: Evidence) -> None:
    run.lanes["train"].pending.add("g99")


def count_a_trained_group_less(run: Evidence) -> None:
    run.lanes["train"].counters |= {"trained": 3, "dispatched": 7}


def skip_a_step(run: Evidence) -> None:
    run.steps[1]["step"] = 3


def repeat_a_version(run: Evidence) -> None:
    run.steps[1]["version"] = 1


def stop_early(run: Evidence) -> None:
    run.steps.pop()
    run.policy = {"version": "1", "step": "1"}


def disagree_about_the_policy(run: Evidence) -> None:
    run.policy["version"] = "7"


def train_something_else(run: Evidence) -> None:
    run.steps[0]["groups"] = ["g1", "g0"]


def archive_something_else(run: Evidence) -> None:
    run.archive[1]["groups"].reverse()


def archive_nothing(run: Evidence) -> None:
    run.checkpoints.clear()
    del run.archive[2]


def mask_what_is_whole(run: Evidence) -> None:
    run.archive[1]["groups"][0]["samples"][0]["masked"] = True
    run.shares[1].pop(0)


def lose_a_record(run: Evidence) -> None:
    del run.records[1]


def archive_a_payload_twice(run: Evidence) -> None:
    run.shares[1].append(run.shares[1][0])


def train_what_was_filtered(run: Evidence) -> None:
    for entry in run.entries["verdicts"]:
        if entry.body and entry.body["group"] == "g2":
            entry.body["outcome"] = "correct"


def filter_what_was_mixed(run: Evidence) -> None:
    run.groups[KEPT]["state"] = "filtered"


def die_without_a_letter(run: Evidence) -> None:
    run.groups[FILTERED]["state"] = "dead"


def refuse_an_own_message(run: Evidence) -> None:
    append(run, "dead", {**LETTER, "cause": "invalid", "entry": run.entries["tasks"][0].id}, LATER)


def train_too_late(run: Evidence) -> None:
    run.recipe["limits"]["max_staleness"] = 0


def lie_about_staleness(run: Evidence) -> None:
    run.entries["batches"][1].body["groups"][0]["samples"][0]["staleness"] = 0


def drop_a_prompt_silently(run: Evidence) -> None:
    run.evaluations[0]["prompts"] = 1


WRONGS: tuple[tuple[Callable[[Evidence], None], Kind, str], ...] = (
    (lose_a_hash, Kind.LOST, FILTERED),
    (lose_a_pending_group, Kind.LOST, PENDING),
    (lose_a_task, Kind.LOST, PENDING),
    (lose_a_sample, Kind.LOST, PENDING),
    (lose_a_verdict, Kind.LOST, PENDING),
    (forget_to_decide, Kind.LOST, PENDING),
    (forget_a_dead_letter, Kind.LOST, PENDING),
    (forget_a_dead_letter_in_a_run_that_hangs, Kind.LOST, PENDING),
    (forget_in_a_long_run, Kind.LOST, PENDING),
    (lose_a_trained_group, Kind.LOST, "g9"),
    (leave_a_batch_behind, Kind.LOST, KEPT),
    (lose_a_prompt, Kind.LOST, "e.held-out.after.000000"),
    (orphan_a_group, Kind.LOST, STALE),
    (drop_a_prompt_without_a_letter, Kind.LOST, "e.held-out.before"),
    (train_in_two_steps, Kind.DUPLICATED, "g0"),
    (train_twice_in_one_step, Kind.DUPLICATED, "g3"),
    (judge_twice, Kind.DUPLICATED, "g0"),
    (judge_a_prompt_twice, Kind.DUPLICATED, PROMPTS[0]),
    (announce_twice, Kind.DUPLICATED, "g0"),
    (dispatch_twice, Kind.DUPLICATED, "g0"),
    (publish_another_batch, Kind.DUPLICATED, "step 2"),
    (put_a_group_into_two_batches, Kind.DUPLICATED, "g0"),
    (evaluate_twice, Kind.DUPLICATED, "held-out before"),
    (miss_an_entry, Kind.GAP, "events"),
    (forget_an_entry, Kind.GAP, "samples"),
    (break_the_tail, Kind.GAP, "tasks"),
    (count_wrongly, Kind.COUNTERS, "train"),
    (count_one_too_many, Kind.COUNTERS, "train"),
    (count_a_stranger, Kind.COUNTERS, "g99"),
    (count_a_trained_group_less, Kind.COUNTERS, "train"),
    (skip_a_step, Kind.HISTORY, "steps"),
    (repeat_a_version, Kind.HISTORY, "versions"),
    (stop_early, Kind.HISTORY, "steps"),
    (disagree_about_the_policy, Kind.HISTORY, "policy"),
    (train_something_else, Kind.HISTORY, "step 1"),
    (archive_something_else, Kind.ARCHIVE, "step 1"),
    (archive_nothing, Kind.ARCHIVE, "step 2"),
    (mask_what_is_whole, Kind.ARCHIVE, "step 1"),
    (lose_a_record, Kind.ARCHIVE, "step 1"),
    (archive_a_payload_twice, Kind.ARCHIVE, "step 1"),
    (train_what_was_filtered, Kind.RULE, "g2"),
    (filter_what_was_mixed, Kind.RULE, KEPT),
    (die_without_a_letter, Kind.RULE, FILTERED),
    (refuse_an_own_message, Kind.RULE, "tasks"),
    (train_too_late, Kind.STALENESS, "step 2"),
    (lie_about_staleness, Kind.STALENESS, "step 2"),
    (drop_a_prompt_silently, Kind.COUNTERS, "held-out before"),
)
"""The change to the clean run; the kind and the subject of the finding."""


@pytest.mark.parametrize(("wrong", "kind", "subject"), WRONGS, ids=[wrong[0].__name__ for wrong in WRONGS])
def test_a_violation_is_found(wrong: Callable[[Evidence], None], kind: Kind, subject: str):
    run = clean_run()
    wrong(run)
    found = judge(run).of(kind)
    assert any(finding.subject.startswith(subject) for finding in found), judge(run)


def test_every_check_can_fail():
    """Each check finds at least one of the violations."""
    from tests.chaos.story import Story

    finds = dict.fromkeys(CHECKS, 0)
    for wrong, _, _ in WRONGS:
        run = clean_run()
        wrong(run)
        for check in CHECKS:
            finds[check] += any(True for _ in check(Story(run)))
    assert [check.__name__ for check, count in finds.items() if not count] == []


@pytest.mark.parametrize(
    ("stream", "body"),
    [("tasks", task("g0")), ("samples", sample("g0", 0)), ("verdicts", verdict("g0", 0, "wrong")), ("tasks", None)],
)
def test_injected_messages_are_no_violation(stream: str, body: dict[str, Any] | None):
    run = clean_run()
    append(run, stream, body, LATER)
    letter = {**LETTER, "cause": "invalid", "stream": f"penstock:{{run}}:{stream}", "entry": LATER}
    append(run, "dead", letter, "9001-0")
    run.injected = {stream: {LATER}}
    assert judge(run).findings == ()


def test_a_damaged_payload_may_be_missing_from_the_archive():
    run = clean_run()
    mask_what_is_whole(run)
    append(run, "events", {"phase": "payload-damaged", "text": f"step 1: {synthetic.payload('g0', 0)} is gone"}, LATER)
    assert judge(run).findings == ()


@pytest.mark.parametrize("until_s", [1, 60])
def test_a_dead_letter_just_before_the_last_step_may_be_pending(until_s: int):
    """After the last step the sampler releases no group, however long the last evaluation takes."""
    run = clean_run()
    dead_letter(run, LATER)
    train_the_last_step_at(run, until_s)
    append(run, "events", {"phase": "evaluated", "text": "after"}, "990000-0")
    assert judge(run).findings == ()


def test_samples_and_letters_before_a_rewind_do_not_count():
    run = rewound_run()
    append(run, "samples", sample(PENDING, 0), "5000-0")
    append(run, "verdicts", verdict(PENDING, 0, "wrong"), "5001-0")
    append(run, "dead", {**LETTER, "cause": "deliveries", "group": PENDING, "entry": "1-0"}, "5002-0")
    train_the_last_step_at(run, 90)
    assert judge(run).findings == ()
    lose_a_task(run)
    [found] = judge(run).findings
    assert (found.kind, found.subject) == (Kind.LOST, PENDING)


def test_an_evaluation_before_a_rewind_may_be_repeated():
    """Its groups leave Redis with the rewind; only what the surviving history records counts."""
    run = rewound_run()
    append(run, "evaluations", run.evaluations[0], "9950-0")
    assert judge(run).findings == ()
    append(run, "evaluation:tasks", task("e.held-out.after.000000"), "9960-0")
    assert {(found.kind, found.subject) for found in judge(run).findings} == {
        (Kind.LOST, "e.held-out.after.000000"),
        (Kind.COUNTERS, "evaluation"),
    }


def test_a_rewind_starts_a_second_life():
    """Work repeated after a rewind is not a duplicate."""
    run = rewound_run()
    assert judge(run).findings == ()
    judge_twice(run)
    append(run, "verdicts", verdict("g0", 0, "wrong"), "9900-0")
    assert judge(run).duplicated == 1
