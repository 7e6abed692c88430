"""Owns the problems of a data set: the question and the answer of each row, in any layout of recipes.

Must not rewrite a problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deploy.cli.data.rewriting import Problem
from services.sampler.data import RowRewards
from services.sampler.data.sources import items
from services.settings import SourceSettings
from services.settings.data import FieldMapping
from services.settings.faults import invalid

SOURCES = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
"""The source by a file's suffix; a folder is a dataset as Hugging Face saves it."""
ANSWER = "answer"


class NumberedProblem(NamedTuple):
    """The problem of row `number`, from 1; `fault`: why it cannot be rewritten, '' if it can."""

    number: int
    problem: Problem
    fault: str = ""


def source_of(path: Path, layout: str, split: str | None, fields: dict[str, Any]) -> SourceSettings:
    """The settings of a data set. Raises ValueError."""
    source = "hf" if path.is_dir() else SOURCES.get(path.suffix)
    if source is None or not path.exists():
        raise ValueError(invalid("INPUT", str(path), "an existing .jsonl, .csv or .parquet file, or a folder"))
    document = {"source": source, "path": str(path.absolute()), "layout": layout, "split": split}
    return SourceSettings.model_validate(document | {"fields": FieldMapping.model_validate(fields)})


def problems(source: SourceSettings) -> Iterator[NumberedProblem]:
    """All rows of a data set. Raises DataError for the first one that is not valid."""
    for number, item in enumerate(items(source, "INPUT", None, RowRewards()), start=1):
        answer = item.reference.get(ANSWER)
        text = str(answer) if isinstance(answer, str | int | float) and not isinstance(answer, bool) else ""
        problem = Problem(item.messages[-1]["content"], text.strip())
        fault = "" if text.strip() else "its reference has no answer"
        yield NumberedProblem(number, problem, fault if len(item.messages) == 1 else "its prompt has several messages")
