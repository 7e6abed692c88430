"""Owns a run's prompts: where they come from, what a row means, how they are worded, split and walked.

Must not tokenise, nor know a verifier's code.
"""

from services.sampler.data.cursor import PromptCursor, PromptsExhaustedError
from services.sampler.data.rows import DataError
from services.sampler.data.splits import DataReport, Splits, load_set, load_splits

__all__ = ["DataError", "DataReport", "PromptCursor", "PromptsExhaustedError", "Splits", "load_set", "load_splits"]
