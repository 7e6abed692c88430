"""Owns the tests that need NVIDIA GPUs.

Must not be part of `make test`. What each test needs is in `tests/gpu/needs.py`; pytest.ini here lets these tests run
where only torch, DeepSpeed, transformers, pydantic, safetensors, pyarrow and pytest are installed.
"""
