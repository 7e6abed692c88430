"""Owns the progress of one evaluation of one set, and the result of a judged prompt.

Must not talk to Redis, or decide which prompts are dispatched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from services.contracts import Outcome, PromptResult, Release, Task
from services.sampler.evaluation.scores import Response, average, by_name, majority, passes, sizes
from services.sampler.groups import Group, GroupVerdicts, stored_verdicts
from services.streams.state.group_state import EVALUATED, REOPENED

CORRECTNESS = {Outcome.CORRECT: True, Outcome.WRONG: False, Outcome.UNKNOWN: None}


def result_of(group: Group) -> PromptResult:
    """What the record of an evaluation needs of a prompt; see services.sampler.evaluation.scores."""
    responses = [Response(CORRECTNESS[verdict.outcome], verdict.answer) for verdict in group.in_order]
    facts = [verdict.facts for verdict in group.in_order]
    scores = [verdict.score for verdict in group.in_order if verdict.outcome is not Outcome.UNKNOWN]
    pass_at = [passes(responses, k) for k in sizes(group.task.samples)]
    return PromptResult(
        average=average(responses),
        majority=majority(responses),
        passes=tuple(value for value in pass_at if value is not None),
        score=fmean(scores) if scores else None,
        rewards=by_name([verdict.rewards for verdict in group.in_order]),
        responses=len(responses),
        unknown=sum(response.correct is None for response in responses),
        response_tokens=sum(sample.response_tokens for sample in facts),
        truncated=sum(sample.truncated for sample in facts),
        oldest_version=min(sample.oldest_version for sample in facts),
        newest_version=max(sample.newest_version for sample in facts),
    )


@dataclass
class EvaluationProgress:
    """The progress of one evaluation of one set: its waiting, dispatched, judged and dropped prompts.

    A prompt goes by the name of its group; `tasks` has them all. Each is answered `samples` times, and takes at most
    `prompt_bytes` of memory in Redis. `dispatched` is in the order of dispatch. `undecided`: dispatched prompts that
    were added with all their verdicts. `verdicts`: how many this sampler has read.
    """

    tasks: Mapping[str, Task]
    samples: int
    prompt_bytes: int
    waiting: deque[str] = field(default_factory=deque)
    dispatched: dict[str, Group] = field(default_factory=dict)
    judged: dict[str, PromptResult] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    undecided: list[str] = field(default_factory=list)
    verdicts: int = 0

    @property
    def done(self) -> bool:
        """Whether every prompt is judged or dropped."""
        return not self.waiting and not self.dispatched

    @property
    def ended(self) -> int:
        """How many prompts are judged or dropped."""
        return len(self.judged) + len(self.dropped)

    def add(self, name: str, fields: Mapping[bytes, bytes]) -> None:
        """Add a prompt in the state that its group's hash in Redis has. An empty hash: it was never dispatched."""
        state = fields.get(b"state", b"").decode()
        if state in ("", REOPENED):
            self.waiting.append(name)
        elif state == Release.DEAD:
            self.dropped.add(name)
        elif state == EVALUATED and b"result" in fields:
            self.judged[name] = PromptResult.model_validate_json(fields[b"result"])
        else:
            group = Group(self.tasks[name], stored_verdicts(fields))
            if state == EVALUATED:  # by a sampler of an older release, which kept the verdicts
                self.judged[name] = result_of(group)
                return
            self.dispatched[name] = group
            if group.judged:
                self.undecided.append(name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove prompts that do not wait, to add them as Redis has them."""
        for name in names:
            self.dispatched.pop(name, None)
            self.judged.pop(name, None)
            self.dropped.discard(name)

    def settle(self, verdicts: GroupVerdicts) -> None:
        """End a prompt if it has all its verdicts, and set that decision."""
        group = self.dispatched[verdicts.group]
        if group.judged:
            self.judged[verdicts.group] = result = result_of(group)
            verdicts.decision, verdicts.result = EVALUATED, result.model_dump_json()
            del self.dispatched[verdicts.group]
