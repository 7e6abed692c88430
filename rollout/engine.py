"""Owns the inference engine: one vLLM AsyncLLM, token ids in, token ids and behaviour log-probs out.

Must not know groups, streams, or how weights arrive. No other module uses AsyncLLM.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.nuclei import WideNucleusError, nuclei_of
from rollout.processes.environment import TRANSFER_BACKEND, core_process, engine_environment, load_libraries
from services.contracts import Sampling, VersionSpan, nucleus_limit
from services.settings import Recipe, RecipeError
from services.streams.delivery.drawn import DrawnTokens, spans_within
from services.streams.delivery.nucleus import Nuclei

log = logging.getLogger(__name__)

# Tokens per KV block on CPU, whose attention accepts only multiples of 32. vLLM's default there is 128, with which a
# prompt of 50 tokens is never shared by its group. SmolLM2 fp32, one thread, 8 groups of 8 over 50-token
# prompts, 24 tokens each: prefill 9.4 s and 103 tok/s with 128; 3.4 s and 142 tok/s with 32.
BLOCK_SIZE = 32
RPC_DEADLINE_S = 60.0
LOOK_S = 1.0


class EngineError(RuntimeError):
    """The engine's answer must not be trained on."""


class PoisonedError(EngineError):
    """Applying weights failed half-way: the engine holds weights of two versions and must be replaced."""


@dataclass(frozen=True)
class Generation:
    """One response.

    response_ids: int32 [T], including the stop token; behaviour_logprobs: float32 [T], natural logarithm of the
    probability with which each token was sampled (after temperature, top-k and top-p); spans cover [0, T);
    finish_reason: "stop" (a stop token was sampled) or "length"; nuclei: what each token was drawn from, with top-k.
    """

    response_ids: NDArray[np.int32]
    behaviour_logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    nuclei: Nuclei | None = None


def engine_seed(seed: int, replica: str) -> int:
    """A different seed per replica: with the recipe's seed, all replicas would sample the same noise."""
    return (seed + zlib.crc32(replica.encode())) % 2**31


def _engine_arguments(recipe: Recipe, model_path: str, replica: str, block_size: int) -> dict[str, Any]:
    """AsyncEngineArgs of the recipe (vLLM 0.32)."""
    rollout = recipe.rollout
    arguments = {
        # The label model_name of vLLM's metrics, else a path; the run and the process are labels of the page's target.
        "served_model_name": "policy",
        **rollout.engine,
        "model": model_path,
        "dtype": rollout.dtype,
        "seed": engine_seed(recipe.seed, replica),
        "max_model_len": recipe.model.max_model_len,
        "max_num_seqs": rollout.max_sequences,
        "kv_cache_memory_bytes": rollout.kv_cache_mib * 2**20,
        "tensor_parallel_size": rollout.tensor_parallel,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        # Log-probs of the distribution that tokens are sampled from, not of the raw logits.
        "logprobs_mode": "processed_logprobs",
        # The sampling parameters in the model's folder (top-k, penalties) would silently change the policy.
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "worker_extension_cls": "rollout.processes.vllm_worker.WorkerExtension",
        # No log line every 10 s; the metrics that vLLM logs are on this process's page all the same, see `start`.
        "disable_log_stats": True,
        # On CPU, compiling takes 40 s at start and a C++ compiler; a run does not recover that time.
        "enforce_eager": rollout.eager or rollout.gpus == 0,
    }
    if recipe.model.head_dtype is not None:
        arguments["hf_overrides"] = {"head_dtype": recipe.model.head_dtype}
    if rollout.top_k is not None:
        arguments["max_logprobs"] = _columns(rollout.top_k)
    if rollout.gpus == 0:
        arguments["block_size"] = block_size
        arguments["kv_transfer_config"] = {
            "kv_connector": "PromptTails",
            "kv_connector_module_path": "rollout.processes.prompt_tails",
            "kv_role": "kv_consumer",
        }
    return arguments


def _columns(top_k: int | None) -> int:
    """How many of the likeliest tokens are requested with each: the largest nucleus, and one that is not in it."""
    return 0 if top_k is None else nucleus_limit(top_k) + 1


class RolloutEngine:
    """A started engine. `stop` ends its processes; they also end when this process dies."""

    def __init__(self, llm: Any, recipe: Recipe, stop_ids: Sequence[int]) -> None:
        self._llm = llm
        self._stop_ids = sorted(stop_ids)
        self._stall_s = recipe.limits.stall_timeout_s
        self.version: int | None = None
        """The policy version that the loaded weights were declared to be."""

    @classmethod
    async def start(
        cls, recipe: Recipe, model_path: str, stop_ids: Sequence[int], replica: str, block_size: int = BLOCK_SIZE
    ) -> RolloutEngine:
        """Load the model (13 s and more on two cores) and answer one request, so that the first task is not slow.

        Works in any thread's event loop. Raises RecipeError for a run of an earlier release whose responses must not be
        trained on, RuntimeError when the engine's processes fail, TimeoutError when they are not ready after
        limits.startup_timeout_s.
        """
        if faults := recipe.sampling_faults:
            raise RecipeError("\n".join(faults))

        def build() -> Any:
            load_libraries(recipe)  # unless that was done before
            # Imported here: vLLM reads its variables on import, and importing it takes seconds.
            with engine_environment(recipe), core_process(recipe):
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM
                from vllm.v1.metrics.loggers import PrometheusStatLogger

                arguments = _engine_arguments(recipe, model_path, replica, block_size)
                # With any of them vLLM measures every engine step; its interval is only that of the log line.
                loggers: list[Any] | None = [PrometheusStatLogger] if recipe.rollout.engine_metrics else None
                try:
                    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers)
                except (TypeError, ValueError) as error:
                    if recipe.rollout.engine:
                        given = ", ".join(f"rollout.engine.{name}" for name in recipe.rollout.engine)
                        raise EngineError(f"vLLM does not start with {given}: {error}") from error
                    raise

        # In another thread: the event loop has to send heartbeats.
        llm = await asyncio.to_thread(build)
        engine = cls(llm, recipe, stop_ids)
        try:
            async with asyncio.timeout(recipe.limits.startup_timeout_s):
                await engine._warm_up()
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _warm_up(self) -> None:
        sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=2)
        await self._final_output([0], sampling, "warm-up", None)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, seed: int | None = None
    ) -> Generation:
        """Generate one response; cancelling the call aborts the request in the engine.

        Raises EngineError for an invalid answer (no published version, non-finite log-prob), WideNucleusError, vLLM's
        EngineDeadError when the engine has died, TimeoutError after limits.stall_timeout_s.
        """
        async with asyncio.timeout(self._stall_s):
            output = await self._final_output(prompt_ids, sampling, request_id, seed)
        return generation_of(output.outputs[0], request_id, self._llm.model_config.get_vocab_size())

    async def _final_output(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, seed: int | None
    ) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            stop_token_ids=self._stop_ids,
            logprobs=min(_columns(sampling.top_k), self._llm.model_config.get_vocab_size()),
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        async for output in self._llm.generate({"prompt_token_ids": list(prompt_ids)}, parameters, request_id):
            final = output
        if final is None:
            raise EngineError(f"request {request_id} failed: the engine returned no output")
        return final

    def drawn(self, request_id: str, start: int) -> DrawnTokens | None:
        """The tokens from `start` on that a running request has so far; None if there are none, or it does not run.

        Read where vLLM (0.32) collects them for the final output: intermediate outputs would cost a message per token,
        and have no versions. Raises EngineError like `generate`; WideNucleusError.
        """
        processor = self._llm.output_processor
        running = [processor.request_states.get(name) for name in processor.external_req_ids.get(request_id, ())]
        if not running or running[-1] is None:
            return None
        state = running[-1]
        end = state.detokenizer.num_output_tokens()
        if end <= start:
            return None
        arrays = _arrays(
            state.detokenizer.output_token_ids[start:end],
            state.logprobs_processor.logprobs[start:end],
            request_id,
            self._llm.model_config.get_vocab_size(),
        )
        spans = _version_spans(state._weight_version_spans(), end, request_id)
        return DrawnTokens(arrays[0], arrays[1], spans_within(spans, start, end), arrays[2])

    async def call_workers(self, method: str, *args: Any, deadline_s: float = RPC_DEADLINE_S) -> list[Any]:
        """Call a method of WorkerExtension in every worker, between two decoding steps; returns the answers by rank."""
        async with asyncio.timeout(deadline_s):
            return list(await self._llm.collective_rpc(method, args=args))

    async def use_spare_cores(self, least: int, most: int) -> None:
        """Look once a second with how many threads the engine may compute, until cancelled; see SpareCores.

        Raises TimeoutError, vLLM's EngineDeadError.
        """
        while True:
            await self.call_workers("use_spare_cores", least, most)
            await asyncio.sleep(LOOK_S)

    async def apply_staged(self, version: int, deadline_s: float) -> None:
        """Apply the staged weights at a token boundary; running requests continue with them.

        All caches are cleared (vLLM's prefix cache does not know that the weights changed), so running requests
        are prefilled again. Raises PoisonedError: the engine then stays paused and must be replaced.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            async with asyncio.timeout(deadline_s):
                await self._llm.pause_generation(mode="keep", clear_cache=True)
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
                await self._llm.finish_weight_update(str(version))
                held = await self._llm.get_weight_version()
                if held != str(version):
                    raise EngineError(f"the engine reports version {held!r}; {version} was applied")
                self.version = version
                await self._llm.resume_generation()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise PoisonedError(f"applying version {version} failed: {type(error).__name__}: {error}") from error

    async def declare(self, version: int) -> None:
        """Declare the loaded weights to be policy `version`: responses carry it from now on.

        Raises EngineError when the engine reports another version.
        """
        async with asyncio.timeout(RPC_DEADLINE_S):
            await self._llm.update_weight_version(str(version))
            held = await self._llm.get_weight_version()
        if held != str(version):
            raise EngineError(f"the engine reports version {held!r}; {version} was declared")
        self.version = version

    def check(self) -> None:
        """Raise vLLM's EngineDeadError when the engine's processes have died."""
        if self._llm.errored:
            raise self._llm.dead_error

    async def stop(self) -> None:
        """Kill the engine's processes; running requests fail.

        They hold no state worth saving, and a clean exit of two interpreters takes seconds of a shared core.
        """
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            # Otherwise it reports the intended end of the processes as their death.
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, 0.0)
        # AsyncLLM shuts down again when it is collected, and logs an error if that happens at the interpreter's exit.
        llm.shutdown = lambda: None


def generation_of(completion: Any, request_id: str, vocabulary: int) -> Generation:
    """Check and convert a vLLM CompletionOutput. Raises EngineError; WideNucleusError for a response to draw again."""
    if completion.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"finish_reason of request {request_id}: {completion.finish_reason!r} is not valid: "
            "expected 'stop' or 'length'"
        )
    tokens, logprobs, nuclei = _arrays(completion.token_ids, completion.logprobs, request_id, vocabulary)
    spans = _version_spans(completion.weight_versions, len(tokens), request_id)
    return Generation(tokens, logprobs, spans, completion.finish_reason, nuclei)


def _arrays(
    token_ids: Sequence[int], flat: Any, request_id: str, vocabulary: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], Nuclei | None]:
    """Tokens (int32 [T]), their log-probs (float32 [T]) and nuclei, from vLLM's FlatLogprobs."""
    tokens = np.asarray(token_ids, np.int32)
    try:
        # Each row: the sampled token, then the likeliest ones, if any were requested.
        ids = np.asarray(flat.token_ids, np.int32).reshape(len(tokens), -1)
        logprobs = np.asarray(flat.logprobs, np.float32).reshape(ids.shape)
        nuclei = None
        if ids.shape[1] > 1:
            nuclei = nuclei_of(ids[:, 1:], logprobs[:, 1:], vocabulary)
            nuclei.check(tokens)
    except WideNucleusError:
        raise
    except ValueError as error:
        raise EngineError(f"request {request_id} failed: {error}") from None
    if not np.array_equal(ids[:, 0], tokens):
        raise EngineError(f"request {request_id} failed: its log-probs belong to other tokens than those sampled")
    if not np.isfinite(logprobs[:, 0]).all():
        raise EngineError(f"request {request_id} failed: a sampled token has a log-prob that is not finite")
    return tokens, logprobs[:, 0].copy(), nuclei


def _version_spans(stamps: Any, tokens: int, request_id: str) -> tuple[VersionSpan, ...]:
    spans = []
    for stamp in stamps or ():
        if not stamp.version.isdecimal():
            raise EngineError(
                f"weight version of request {request_id}: {stamp.version!r} is not valid: expected a number"
            )
        spans.append(VersionSpan(version=int(stamp.version), start=stamp.start, end=stamp.end))
    ends = [0, *(span.end for span in spans)]
    if ends[-1] != tokens or any(span.start != end for span, end in zip(spans, ends, strict=False)):
        raise EngineError(f"request {request_id} failed: version spans {spans} do not cover its {tokens} tokens")
    return tuple(spans)
