"""Owns the messages that services exchange: frozen pydantic models, one per stream entry.

Must not import any engine, Redis, or another package of this project.
"""

from services.contracts.base import SCHEMA_VERSION, Count, Finite, Lane, Message, Value
from services.contracts.evaluation import AFTER, ALONE, BEFORE, EvaluationRecord, PassAt, PromptResult
from services.contracts.events import COMMON_PHASES, PHASES, PROMPT_FAULTS, Cause, DeadLetter, Event
from services.contracts.groups import (
    MOST_TOP_K,
    EvaluationCounts,
    GroupCounts,
    Outcome,
    Prompt,
    Release,
    Sample,
    SampleFacts,
    Sampling,
    Task,
    Verdict,
    VersionSpan,
    nucleus_limit,
)
from services.contracts.ownership import UNOWNED, Fence
from services.contracts.results import SampleResult, SandboxFault, TaskResult, VerdictResult
from services.contracts.runs import Closing, HostPid, ProcessInfo, RunState, Transition, Wait
from services.contracts.training import (
    Batch,
    BatchGroup,
    BatchSample,
    CommittedPolicy,
    OptimizerStepRecord,
    SamplerSnapshot,
    SamplerState,
    StepRecord,
)
from services.contracts.weights import EPOCH_SHIFT, TensorEntry, WeightAck, WeightManifest, WeightPlan, parse_manifest

__all__ = [
    "AFTER",
    "ALONE",
    "BEFORE",
    "COMMON_PHASES",
    "EPOCH_SHIFT",
    "MOST_TOP_K",
    "PHASES",
    "PROMPT_FAULTS",
    "SCHEMA_VERSION",
    "UNOWNED",
    "Batch",
    "BatchGroup",
    "BatchSample",
    "Cause",
    "Closing",
    "CommittedPolicy",
    "Count",
    "DeadLetter",
    "EvaluationCounts",
    "EvaluationRecord",
    "Event",
    "Fence",
    "Finite",
    "GroupCounts",
    "HostPid",
    "Lane",
    "Message",
    "OptimizerStepRecord",
    "Outcome",
    "PassAt",
    "ProcessInfo",
    "Prompt",
    "PromptResult",
    "Release",
    "RunState",
    "Sample",
    "SampleFacts",
    "SampleResult",
    "SamplerSnapshot",
    "SamplerState",
    "Sampling",
    "SandboxFault",
    "StepRecord",
    "Task",
    "TaskResult",
    "TensorEntry",
    "Transition",
    "Value",
    "Verdict",
    "VerdictResult",
    "VersionSpan",
    "Wait",
    "WeightAck",
    "WeightManifest",
    "WeightPlan",
    "nucleus_limit",
    "parse_manifest",
]
