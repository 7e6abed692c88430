"""The mutation table fits the code, so that `make mutations` keeps working."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from learner.algorithm.clipping import CLIPPINGS
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.ratios import RATIOS
from learner.algorithm.reductions import REDUCTIONS
from services.sampler.advantage.advantages import ADVANTAGES
from services.sampler.advantage.filtering import FILTERS
from services.sampler.advantage.rewards import PUNISHMENTS, REWARDS
from tests.harness.each import each
from tests.mutations.platform import PLATFORM
from tests.mutations.run import ALL, ROOT, copy_checkout, mutated
from tests.mutations.table import MUTATIONS, Mutation

SUFFIXES = {".py", ".lua", ".sh", ".tpl", ".yaml", ".j2"}


@each("fault", PLATFORM, called=lambda fault: fault.name)
def test_each_fault_of_the_platform_applies_once(fault: Mutation) -> None:
    text = (ROOT / fault.file).read_text()
    assert mutated(text, fault) != text
    assert all((ROOT / file).is_file() for file in fault.tests)


@each("mutation", MUTATIONS, called=lambda mutation: mutation.name)
def test_each_applies_once_and_still_parses(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert meaning(mutated(text, mutation)) != meaning(text)


@cache
def meaning(text: str) -> str:
    """The code's syntax tree, equal for two texts that differ only in layout or comments."""
    return ast.dump(ast.parse(text))


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in ALL}) == len(ALL)


OTHERS = ("symmetric", "cispo", "sequence", "sequence_token", "overlong", "overlong, published", "score", "spread")


@each("entry", [*REDUCTIONS, *CORRECTIONS, *ADVANTAGES, *OTHERS])
def test_every_table_entry_has_a_mutation(entry: str) -> None:
    assert any(mutation.name.startswith(f"{entry}:") for mutation in MUTATIONS), (
        "CLIPPINGS' clip_higher is `clip:` here"
    )
    assert set(CLIPPINGS) == {"clip_higher", "symmetric", "cispo"}
    assert set(RATIOS) == {"token", "sequence", "sequence_token"}, "`token` is `loss:` here"
    assert set(PUNISHMENTS) == {"paper", "published"}, "`overlong:` and `overlong, published:` here"
    assert set(REWARDS) == {"verdict", "score"}, "`verdict` is `reward:` here"
    assert set(FILTERS) == {"accuracy", "spread"}, "`accuracy` is `filter:` here"


def test_a_copy_has_every_source(tmp_path: Path) -> None:
    packages = ("benchmarks", "deploy", "helm", "learner", "rollout", "services", "tests", "verifier")
    sources = [path for name in packages for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES]
    copy_checkout(tmp_path)
    assert len(sources) > 500
    assert [str(path) for path in sources if not (tmp_path / path.relative_to(ROOT)).is_file()] == []


@pytest.mark.slow
def test_every_test_can_be_collected_in_a_copy(tmp_path: Path) -> None:
    copy_checkout(tmp_path)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", ""]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-1000:]
