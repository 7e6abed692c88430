"""Owns the commands about what was generated: samples, and lineage, the story of one group.

Must not trust a text: all of it is printed as plain text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.commands.arguments import JsonOption, RunArgument
from penstock_client.cli.following.figures import number
from penstock_client.cli.reporting import warn
from penstock_client.cli.terminal import busy, print_json, print_line, print_note, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import SampleEntry

MOST_SHOWN = 50
MOST_AT_ONCE = 200
"""Samples of one page."""
TEXT_SHOWN = 60


SearchOption = Annotated[
    str | None, typer.Option("--search", metavar="TEXT", help="Only responses that contain this, in any case.")
]
OutcomeOption = Annotated[str | None, typer.Option("--outcome", help="Only samples judged correct, wrong or unknown.")]
ReleaseOption = Annotated[
    str | None,
    typer.Option("--release", help="Only samples of groups that were trained, filtered, stale, dead or evaluated."),
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="Only samples that this rollout step trained.")]
VersionOption = Annotated[
    int | None, typer.Option("--version", min=0, help="Only samples with tokens of this policy version.")
]
PromptOption = Annotated[str | None, typer.Option("--prompt", metavar="ID", help="Only samples of this prompt.")]
LaneOption = Annotated[str | None, typer.Option("--lane", help="Only samples of train, or of evaluation.")]
RewardOption = Annotated[
    str | None,
    typer.Option(
        "--reward", metavar="NAME", help="The reward whose score --min and --max limit; default: the verdict's."
    ),
]
LeastOption = Annotated[float | None, typer.Option("--min", help="The lowest score.")]
MostOption = Annotated[float | None, typer.Option("--max", help="The highest score.")]


def samples(
    client: Client,
    run: RunArgument,
    search: SearchOption = None,
    outcome: OutcomeOption = None,
    release: ReleaseOption = None,
    step: StepOption = None,
    version: VersionOption = None,
    prompt: PromptOption = None,
    lane: LaneOption = None,
    reward: RewardOption = None,
    score_min: LeastOption = None,
    score_max: MostOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = MOST_SHOWN,
    as_json: JsonOption = False,
) -> None:
    """Search the samples of groups that have ended, the last ones first."""
    from penstock_client.answers import as_json as document

    wanted: dict[str, object] = {"text": search, "outcome": outcome, "release": release, "step": step, "prompt": prompt}
    wanted |= {"version": version, "lane": lane, "reward": reward, "score_min": score_min, "score_max": score_max}
    found, more = _found(client, run, wanted, limit)
    if as_json:
        print_json([document(sample) for sample in found])
        return
    headings = ["group", "#", "verdict", "score", "advantage", "fate", "step", "tokens", "response"]
    print_table(headings, list(map(_row, found)), right=["#", "score", "advantage", "step", "tokens"])
    if not found:
        print_note(f"{run}: no sample of an ended group matches")
    elif more:
        print_note(f"and more: --limit {10 * limit}")


def _found(client: Client, run: str, wanted: dict[str, object], limit: int) -> tuple[list[SampleEntry], bool]:
    """At most `limit` samples, and whether there are more; files that cannot be read are a warning."""
    found: list[SampleEntry] = []
    problems: list[str] = []
    more = False
    with busy(f"searching the samples of {run}"):
        for page in client.sample_pages(run, limit=min(limit, MOST_AT_ONCE), **wanted):
            found += page.samples
            problems += page.problems
            more = page.next is not None or len(found) > limit
            if len(found) >= limit:
                break
    for problem in dict.fromkeys(problems):
        warn(f"left out: {problem}")
    return found[:limit], more


def _row(sample: SampleEntry) -> list[str]:
    text = " ".join((sample.text or "-").split())
    return [
        sample.group,
        str(sample.index),
        sample.outcome or "-",
        number(sample.score, "{:g}"),
        number(sample.advantage, "{:+.3f}"),
        sample.release,
        number(sample.step, "{}"),
        number(sample.response_tokens, "{}"),
        text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}...",
    ]


def lineage(
    client: Client,
    run: RunArgument,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Id of the group, as `penstock samples` lists it.")],
    whole: Annotated[bool, typer.Option("--full", help="Do not cut long texts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell the story of a group: its prompt, attempts, samples with verdicts, why it was kept or dropped, its step."""
    from penstock_client.answers import as_json as document
    from penstock_client.cli.following.story import story_lines

    found = client.lineage(run, group)
    if as_json:
        print_json(document(found))
        return
    for line in story_lines(found, whole=whole):
        print_line(line)
