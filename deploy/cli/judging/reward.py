"""Owns `penstock reward`: what can be said about the rewards of a recipe before a run has them.

Must not read data or try a reference itself; the sampler's loading does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from deploy.cli.common import DEFAULT_RUNS, RunsOption, reported_errors
from deploy.cli.judging.trial import try_reward
from penstock_client.cli.commands.arguments import RecipeArgument
from penstock_client.cli.reporting import EXIT_FAILED, fail
from penstock_client.cli.terminal import plain, print_line

if TYPE_CHECKING:
    from services.sampler.data import ReadSources
    from services.sampler.data.gathering import Gathered
    from services.settings import Recipe

app = typer.Typer(help="Try a reward, and check those of a recipe.", no_args_is_help=True)

SHOWN_FAULTS = 20
SHOWN_REWARDS = 5

app.command("try")(try_reward)


@app.command()
def check(recipe: RecipeArgument, runs: RunsOption = DEFAULT_RUNS) -> None:
    """Load all data of a recipe as a run does, and try every reference; exit status 1 if one cannot be read.

    Each function of the recipe or its rows that has no `needs` is loaded, confined as in a run; exit status 2 if one
    cannot be. Data of the Hugging Face Hub is downloaded to the folder of runs.
    """
    from services.sampler.data import DataError, ReferenceTrialError

    os.environ["PENSTOCK_RUNS"] = str(runs.absolute())  # where the sampler's loading finds what is downloaded
    try:
        with reported_errors():
            loaded, files = _loaded(recipe)
            sources = _read(loaded, files)
            _report(sources)
            _check_functions(loaded, sources, files)
            if sources.bad:
                raise typer.Exit(EXIT_FAILED)
            print_line(plain(_split_text(loaded, sources)))
    except (DataError, ReferenceTrialError) as error:
        fail(str(error))
    from_files = any(not found.source.generated for found in sources.all)
    generated = "no reference to try: all prompts are generated, and have the generator's own"
    print_line(f"all {sources.tried} references can be read" if from_files else generated)


def _loaded(path: RecipeArgument) -> tuple[Recipe, dict[str, str]]:
    """The recipe, with copies of its data of the hub in place of their addresses, and the texts of its files."""
    from deploy.cli.recipe_files import load_with_files
    from services.api.addresses import checked_addresses
    from services.storage.hub.address import is_hub
    from services.storage.hub.copies import pinned_data
    from services.storage.models import inputs_folder
    from services.streams.state.run_record import pinned

    recipe, files = load_with_files(path)
    recipe = checked_addresses(recipe)
    fields = {str(source.path): f"{section}.path" for section, source in recipe.data_sources.items()}
    on_hub = {text: field for text, field in fields.items() if is_hub(text)}
    return pinned(recipe, pinned_data(on_hub, inputs_folder(), recipe.limits.startup_timeout_s)), files


def _read(recipe: Recipe, files: Mapping[str, str]) -> ReadSources:
    """What the sampler of a run of this recipe reads."""
    from services.sampler.data import RowRewards, read_sources

    trains = recipe.limits.rollout_steps > 0
    data = recipe.data if trains or recipe.data.held_out else None
    return read_sources(data, recipe.evaluation.sets, RowRewards.of(recipe, files), spare=trains)


def _check_functions(recipe: Recipe, sources: ReadSources, files: Mapping[str, str]) -> None:
    """Raises DataError if the rows name more functions than a verifier holds loaded, or if one cannot be loaded."""
    from deploy.cli.judging.loading import load_faults
    from services.sampler.data import DataError, row_functions

    rows = (rows for found in sources.all for known in found.questions.values() for rows in known.values())
    row_functions(recipe, (each.item.verifier for each in rows))
    if faults := load_faults(recipe, sources, files):
        raise DataError("\n".join(faults))


def _split_text(recipe: Recipe, sources: ReadSources) -> str:
    """What a run makes of its sources. Raises DataError if they have too few questions."""
    from services.sampler.data import evaluated_prompts, split

    settled = sources.settled()
    if recipe.limits.rollout_steps > 0:
        return split(recipe.data, settled).report.text
    return evaluated_prompts(recipe.data, settled).text


def _report(sources: ReadSources) -> None:
    """Print a line per source, and the first faults."""
    for found in sources.all:
        print_line(plain(_source_text(found)))
    for bad in sources.bad[:SHOWN_FAULTS]:
        print_line(plain(bad.text))
    if (more := len(sources.bad) - SHOWN_FAULTS) > 0:
        print_line(f"and {more} more")


def _source_text(found: Gathered) -> str:
    used = Counter(rows.item.verifier for known in found.questions.values() for rows in known.values())
    rewards = [f"{count} for {text}" for text, count in used.most_common(SHOWN_REWARDS)]
    others = [f"{len(used) - SHOWN_REWARDS} other rewards"] if len(used) > SHOWN_REWARDS else []
    bad = f", {len(found.bad)} cannot be read" if found.bad else ""
    return (
        f"{found.where}: {found.rows} rows, {len(found.questions)} distinct questions; "
        f"references: {', '.join([*rewards, *others]) or 'none'}{bad}"
    )
