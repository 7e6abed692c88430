"""Owns which further arguments of DeepSpeed and vLLM a recipe may give, by name and type.

Must not import an engine: their names are in known.json, which tests/harness/engine_table.py makes.
"""

from services.settings.engines.arguments import EngineArguments, deepspeed_fault, vllm_fault

__all__ = ["EngineArguments", "deepspeed_fault", "vllm_fault"]
