"""Owns judged groups for tests: verdicts with the facts that advantages, batches and metric windows read.

Must not be used outside tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.contracts import Outcome, Prompt, SampleFacts, Sampling, Task, Verdict
from services.sampler.evaluation.evaluator import sampling_of
from services.sampler.groups import Group
from services.settings import Recipe, parse_recipe
from tests.harness.small_run import recipe_document

SCORES = {Outcome.CORRECT: 1.0, Outcome.WRONG: 0.0, Outcome.UNKNOWN: 0.0}
"""Those of a verifier that gives no others."""


def group_of(
    *samples: tuple[Outcome, int, bool, int],
    rest: int = 0,
    scores: Sequence[float] = (),
    rewards: Sequence[Mapping[str, float]] = (),
) -> Group:
    """A group from (outcome, response tokens, truncated, oldest version); `rest`: samples that the screen left out.

    `scores`, `rewards`: those of each verdict, by default SCORES and none.
    """
    prompt = Prompt(id="p", messages=(), verifier="pattern", reference={})
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=16)
    stop = len(samples) if rest else None
    group = Group(Task(group="g", prompt=prompt, samples=len(samples) + rest, sampling=sampling, stop=stop))
    for index, (outcome, tokens, truncated, version) in enumerate(samples):
        facts = SampleFacts(
            payload=f"g:{index}",
            prompt_tokens=5,
            response_tokens=tokens,
            truncated=truncated,
            mean_logprob=-1.0,
            oldest_version=version,
            newest_version=version,
            started_at=10.0,
            finished_at=10.0 + tokens,
            replica=f"rollout-{index}",
        )
        score = scores[index] if scores else SCORES[outcome]
        named = dict(rewards[index]) if rewards else {}
        group.verdicts[index] = Verdict(
            group="g", index=index, outcome=outcome, score=score, rewards=named, facts=facts
        )
    return group


def recipe(reward: str = "verdict", **overlong: Any) -> Recipe:
    """The tests' recipe (16 new tokens) with an overlong cache of 8 tokens and the given settings."""
    return parse_recipe(recipe_document("/m", algorithm={"reward": reward, "overlong": {"cache": 8, **overlong}}))


def answered_group(
    name: str, *verdicts: tuple[Outcome, str], oldest: int = 3, newest: int = 3, tokens: int = 4
) -> Group:
    """A group of an evaluation, from (outcome, answer) of its samples; its first sample is truncated."""
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), verifier="math", reference={})
    sampling = sampling_of(parse_recipe(recipe_document("/m")))
    group = Group(Task(group=name, prompt=prompt, samples=len(verdicts), sampling=sampling))
    for index, (outcome, answer) in enumerate(verdicts):
        facts = SampleFacts(
            payload="k",
            prompt_tokens=3,
            response_tokens=tokens,
            truncated=index == 0,
            mean_logprob=0.0,
            oldest_version=oldest,
            newest_version=newest,
            started_at=0.0,
            finished_at=1.0,
        )
        score = SCORES[outcome]
        verdict = Verdict(group=name, index=index, outcome=outcome, score=score, answer=answer, facts=facts)
        group.verdicts[index] = verdict
    return group
