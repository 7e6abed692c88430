"""Owns the verdict on reasoning-gym tasks: extract the final answer and score it with the task's own scorer.

Must not generate tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from verifier.verifiers.answer_line import answer_line
from verifier.verifiers.base import Judgement
from verifier.verifiers.evaluating import evaluates, runs_code

TAGGED = re.compile(r"<answer>(.{0,2000}?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d{1,100}(?:\.\d{1,100})?")


@cache
def _scorer(task: str) -> Any:
    import reasoning_gym  # slow to import: only in the judging process

    return reasoning_gym.get_score_answer_fn(task)


def extract_answer(text: str, oracle: str) -> str:
    """A response's final answer.

    Its last <answer> tag; else, where the oracle is a number, its last number; else its last "Answer:" line, the form
    that prompt format `dapo` asks for; else the whole text.
    """
    tagged = TAGGED.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    if NUMBER.fullmatch(oracle):
        numbers = NUMBER.findall(text)
        return str(numbers[-1]) if numbers else ""
    return answer_line(text) or text.strip()


def evaluating_tasks() -> list[str]:
    """The tasks whose scorers run an answer as Python: each of their texts needs a process of its own."""
    from reasoning_gym import factory  # slow to import

    return [task for task in sorted(factory.DATASETS) if evaluates(task)]


def judge(text: str, reference: Mapping[str, Any], options: Mapping[str, Any]) -> Judgement:
    """`reference` holds `task` and the generated `entry`; correct iff the task's own scorer gives 1.

    An answer that would run code is wrong: a scorer that evaluates answers is not given it.
    """
    task, entry = reference["task"], reference["entry"]
    answer = extract_answer(text, str(entry["answer"]))
    if evaluates(task) and runs_code(answer):
        return Judgement(correct=False, score=0.0, answer=answer, reason="the answer would run code; it is not run")
    score = float(_scorer(task)(answer, entry))
    reason = f"the scorer of {task} gives {score:g} for {answer[:100]!r}"
    return Judgement(correct=score >= 1.0, score=min(1.0, max(0.0, score)), answer=answer, reason=reason)
