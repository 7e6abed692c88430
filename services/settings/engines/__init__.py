"""Owns which further arguments of DeepSpeed and vLLM a recipe may give, and with which values.

Must not import an engine: their arguments are in known.json, which tests/harness/engine_table.py makes.
"""

from services.settings.engines.arguments import (
    EngineArguments,
    combination_fault,
    deepspeed_fault,
    schedule_fault,
    vllm_fault,
)

__all__ = ["EngineArguments", "combination_fault", "deepspeed_fault", "schedule_fault", "vllm_fault"]
