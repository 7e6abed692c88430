"""Owns a run's prompts: their sources, the layout of rows, their format, the splits and the walk over them.

Must not tokenise, or import a verifier's code.
"""

from services.sampler.data.cursor import PromptCursor, PromptsExhaustedError
from services.sampler.data.rows import DataError
from services.sampler.data.splits import DataReport, Splits, load_set, load_splits

__all__ = ["DataError", "DataReport", "PromptCursor", "PromptsExhaustedError", "Splits", "load_set", "load_splits"]
