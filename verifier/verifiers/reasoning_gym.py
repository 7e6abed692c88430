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
from verifier.verifiers.evaluating import evaluates, is_plain

TAGGED = re.compile(r"<answer>(.{0,2000}?)</answer>", re.DOTALL)
INTEGER, MOST_NUMBERS = re.compile(r"\b[0-9]{1,6}\b"), 100
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


def _uses_given_numbers(answer: str, entry: Mapping[str, Any]) -> bool:
    given = entry.get("metadata", {}).get("numbers")
    used = sorted(map(int, INTEGER.findall(answer)[:MOST_NUMBERS]))
    return given is None or used == sorted(map(int, given))


def judge(text: str, reference: Mapping[str, Any], options: Mapping[str, Any]) -> Judgement:
    """`reference` holds `task` and the generated `entry`; correct iff the task's own scorer gives 1.

    A scorer that evaluates answers is given only plain ones; any other is wrong. puzzle24's scorer does not compare the
    numbers with those of its question, so that is done here.
    """
    task, entry = reference["task"], reference["entry"]
    oracle = str(entry["answer"])
    answer = extract_answer(text, oracle)
    if evaluates(task) and not is_plain(task, answer, oracle):
        return Judgement(correct=False, score=0.0, answer=answer, reason=f"not a plain answer of {task}: not evaluated")
    if task == "puzzle24" and not _uses_given_numbers(answer, entry):
        return Judgement(correct=False, score=0.0, answer=answer, reason="it does not use the given numbers once each")
    score = float(_scorer(task)(answer, entry))
    reason = f"the scorer of {task} gives {score:g} for {answer[:100]!r}"
    return Judgement(correct=score >= 1.0, score=min(1.0, max(0.0, score)), answer=answer, reason=reason)
