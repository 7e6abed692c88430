"""Owns a run's prompts: their sources, the layout of rows, their format, the splits and the walk over them.

Must not tokenise, or import a verifier's code.
"""

from services.sampler.data.cursor import PromptCursor, PromptsExhaustedError
from services.sampler.data.references import ReferenceTrialError
from services.sampler.data.row_rewards import RowRewards, row_functions
from services.sampler.data.rows import DataError
from services.sampler.data.splits import (
    DataReport,
    EvaluatedPrompts,
    ReadSources,
    Splits,
    evaluated_prompts,
    load_evaluated,
    load_splits,
    read_sources,
    split,
)

__all__ = [
    "DataError",
    "DataReport",
    "EvaluatedPrompts",
    "PromptCursor",
    "PromptsExhaustedError",
    "ReadSources",
    "ReferenceTrialError",
    "RowRewards",
    "Splits",
    "evaluated_prompts",
    "load_evaluated",
    "load_splits",
    "read_sources",
    "row_functions",
    "split",
]
