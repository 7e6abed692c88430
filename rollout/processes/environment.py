"""Owns the start of an engine's processes: their environment variables, their libraries, where EngineCore comes from.

Must not load a model.

An engine on one CPU has two processes with vLLM: the replica's own, and EngineCore. Each needs 7 s of a core to import
it. vLLM starts EngineCore as a new interpreter once the replica has imported vLLM and read the model's config, so that
the imports follow each other. Here EngineCore is forked from a server that has imported vLLM at the same time as the
replica. Elsewhere vLLM starts its processes itself: a server that is forked must not have touched a GPU, which only its
vendor's libraries know.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from rollout.processes.forking import ForkedContext, load_ahead
from services.contracts.listening import LOOPBACK, advertised_host, socket_environment
from services.contracts.weight_group import nccl_environment
from services.settings import Recipe

TRANSFER_BACKEND = "penstock"
OWNER_VARIABLE = "PENSTOCK_ENGINE_OWNER"
AHEAD = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
)
"""What EngineCore imports; most models share the modules of Llama."""
PRELOADED = (
    ("vllm/libs/libtcmalloc_minimal*.so*", "vllm/libs/libtcmalloc.so*"),
    ("torch.libs/libgomp*.so*", "torch/lib/libgomp*.so*"),
)
"""What vLLM 0.32 has its processes on CPUs preload (vllm/platforms/cpu.py): of each tuple the first that there is."""

_environment_lock = threading.Lock()


def load_libraries(recipe: Recipe) -> None:
    """Import what an engine needs, here and for EngineCore, which takes seconds; no model is needed for it."""
    with engine_environment(recipe):
        if _is_one_process(recipe):
            load_ahead(AHEAD)
        import vllm.v1.engine.async_llm  # noqa: F401


@contextmanager
def core_process(recipe: Recipe) -> Iterator[None]:
    """Have vLLM fork EngineCore in the body, if the engine is one process. Other engines must not start meanwhile."""
    if not _is_one_process(recipe):
        yield
        return
    from vllm.v1.engine import utils

    # vLLM itself would only fork from this process, which has threads, or start a new interpreter.
    before = utils.get_mp_context
    utils.get_mp_context = ForkedContext
    try:
        yield
    finally:
        utils.get_mp_context = before


def _is_one_process(recipe: Recipe) -> bool:
    return recipe.rollout.gpus == 0 and recipe.rollout.tensor_parallel == 1


def _set_by_vllm() -> dict[str, str]:
    """The variables that vLLM sets for EngineCore on a CPU only after its imports, and which these read."""
    site = Path(torch.__file__).parents[1]
    found = [next(chain.from_iterable(map(site.glob, patterns)), None) for patterns in PRELOADED]
    preloaded = ":".join(map(str, filter(None, (*found, os.environ.get("LD_PRELOAD")))))
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
    return threads | ({"LD_PRELOAD": preloaded} if preloaded else {})


@contextmanager
def engine_environment(recipe: Recipe) -> Iterator[None]:
    """Set the variables that the engine's processes inherit at their start; restore them in this process afterwards.

    vLLM sets LD_PRELOAD, which must not reach processes that this process starts later.
    """
    wanted = {
        # The learner shares the cores: threads are not bound, and idle OpenMP threads sleep instead of spinning.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(recipe.rollout.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "HF_HUB_OFFLINE": "1",
        # stop() kills the processes, so the tracker removes their shared memory: intended, hence no warning.
        "PYTHONWARNINGS": ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"))),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(recipe.limits.startup_timeout_s)),
        OWNER_VARIABLE: str(os.getpid()),
        # Its processes are all on this machine.
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_LOOPBACK_IP": LOOPBACK,
        **socket_environment(advertised_host()),
        **nccl_environment(recipe.weights.timeout_s),
    }
    if recipe.rollout.gpus == 0:
        # vLLM's sampler would compile one small function, at the first request: 3 s, and 10 s and more on a machine
        # that has not compiled it yet.
        wanted["TORCH_COMPILE_DISABLE"] = "1"
    if _is_one_process(recipe):
        # One process, as on one GPU. vLLM gives a CPU's worker a process of its own to bind its OpenMP threads, which
        # are not bound here. EngineCore would spin on sched_yield until that worker answers: half a core for nothing,
        # and with Linux 6.18's autogroup the disk's kernel threads, so Redis' fsync, waited seconds for a processor.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        wanted |= _set_by_vllm()
    with _environment_lock:
        before = {name: os.environ.get(name) for name in (*wanted, "LD_PRELOAD")}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
