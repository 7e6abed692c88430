"""Owns how the story of a group is written as lines: prompt, samples, why it was kept or dropped, step, checkpoint.

Must not print, nor trust a text: models write them.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence

from penstock_client.cli.following.figures import number
from penstock_client.cli.terminal import plain
from penstock_client.models import GroupAttempt, GroupLineage, OptimizerFigures, ToldSample, WrittenSpan

WIDTH = 80
INDENT = "  "
TEXT_SHOWN = 400
"""Characters of a text, unless all of it is wanted."""


def story_lines(group: GroupLineage, *, whole: bool) -> Iterator[str]:
    """The story in lines of at most WIDTH characters; `whole`: no text is cut."""
    yield from _wrapped(
        f"group {group.group}: {group.release or 'in flight'}, {_count(len(group.attempts), 'attempt')}"
    )
    if group.problem:
        yield from _wrapped(f"cannot be read: {group.problem}", INDENT)
    if prompt := group.prompt:
        yield ""
        yield from _wrapped(f"prompt {prompt.id}, verifier {prompt.verifier}")
        for message in prompt.messages:
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content)
            yield from _wrapped(f"{message.get('role')}:", INDENT)
            yield from _text(text, whole)
        reference = json.dumps(prompt.reference, ensure_ascii=False)
        yield from _wrapped(f"reference: {_cut(reference, whole)}", INDENT)
    for attempt in group.attempts:
        yield ""
        yield from _attempt(attempt, whole)


def _attempt(attempt: GroupAttempt, whole: bool) -> Iterator[str]:
    name = f"attempt of resumption {attempt.resumption}" if attempt.resumption else "attempt"
    yield from _wrapped(f"{name}: {_count(len(attempt.samples), 'sample')}")
    for sample in attempt.samples:
        yield from _sample(sample, whole)
    yield ""
    yield from _wrapped(
        f"{'released: ' + attempt.release if attempt.release else 'not released yet'}: {attempt.reason}"
    )
    if attempt.step is None:
        return
    facts = [f"rollout step {attempt.step}"]
    if attempt.optimizer_step is not None:
        facts.append(f"optimizer step {attempt.optimizer_step} of it{_figures(attempt.optimizer)}")
    facts += [
        f"{name} {value:g}"
        for name, value in (("learning rate", attempt.learning_rate), ("staleness", attempt.staleness))
        if value is not None
    ]
    if attempt.version is not None:
        facts.append(f"published as version {attempt.version}")
    yield from _wrapped(f"trained: {', '.join(facts)}")
    yield from _wrapped(f"checkpoint: {attempt.checkpoint or 'none that is kept holds this step'}")


def _figures(optimizer: OptimizerFigures | None) -> str:
    if optimizer is None:
        return ""
    if not optimizer.applied:
        return " (skipped: its gradient was not finite)"
    loss, norm = number(optimizer.loss, "{:.4g}"), number(optimizer.gradient_norm, "{:.4g}")
    return f" (loss {loss}, gradient norm {norm})"


def _sample(sample: ToldSample, whole: bool) -> Iterator[str]:
    yield ""
    judged = [f"sample {sample.index}: {sample.outcome or 'no verdict'}"]
    judged += [
        f"{name} {number(value, form)}"
        for name, value, form in (
            ("score", sample.score, "{:g}"),
            ("reward", sample.reward, "{:+.3f}"),
            ("advantage", sample.advantage, "{:+.3f}"),
        )
        if value is not None
    ]
    yield from _wrapped(", ".join(judged + (["masked"] if sample.masked else [])), INDENT)
    for line in _details(sample):
        yield from _wrapped(line, 2 * INDENT)
    if sample.text is None:
        yield from _wrapped("the response is not archived", 2 * INDENT)
    else:
        yield from _text(sample.text, whole)


def _details(sample: ToldSample) -> Iterator[str]:
    facts = [] if sample.response_tokens is None else [_count(sample.response_tokens, "token")]
    if sample.mean_logprob is not None:
        facts.append(f"mean log-prob {sample.mean_logprob:.4f}")
    facts += [f"finish {sample.finish_reason}"] if sample.finish_reason else []
    facts += [f"by {sample.replica}"] if sample.replica else []
    if facts:
        yield ", ".join(facts)
    if sample.spans:
        yield f"policy versions: {', '.join(map(_written, sample.spans))}"
    if sample.rewards:
        yield "rewards: " + ", ".join(f"{name} {value:g}" for name, value in sorted(sample.rewards.items()))
    if sample.reason:
        yield f"reason: {sample.reason}"
    if sample.answer:
        yield f"answer: {sample.answer}"


def _written(span: WrittenSpan) -> str:
    last = span.end - 1
    tokens = f"tokens {span.start} to {last}" if last > span.start else f"token {last}"
    return f"{span.version} wrote {tokens}"


def _text(text: str, whole: bool) -> Iterator[str]:
    """A text with its own line breaks, after a mark by which no line of it looks like one of ours."""
    for line in _cut(text, whole).splitlines() or [""]:
        yield from _wrapped(line, 2 * INDENT + "| ")


def _cut(text: str, whole: bool) -> str:
    return text if whole or len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}... ({len(text):,} characters)"


def _wrapped(text: str, indent: str = "") -> Sequence[str]:
    found = textwrap.wrap(
        plain(text), WIDTH, initial_indent=indent, subsequent_indent=indent if "|" in indent else indent + INDENT
    )
    return found or [indent.rstrip()]


def _count(amount: int, thing: str) -> str:
    return f"{amount:,} {thing}{'' if amount == 1 else 's'}"
