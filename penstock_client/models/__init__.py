"""Owns the answers of the API as models. Times are Unix seconds.

Must not check more than a client needs: a field that a release adds is kept, and one that it lacks has a default.
"""

from penstock_client.models.access import AuditEntryView, AuditList, Identity, Project, ProjectPage, ProjectUse
from penstock_client.models.base import ApiModel
from penstock_client.models.files import CheckpointEntries, ExportedFiles, StoredCheckpoint, StoredFile
from penstock_client.models.lifecycle import ClosedEntries, FaultList, QueuedEntry, RunQueue, UnclosedRun
from penstock_client.models.reports import (
    DeadLetterEntry,
    ProcessLog,
    ProcessLogLine,
    ProcessLogPage,
    ProcessLogs,
    RunHappening,
    RunStory,
    UnknownVerdictEntry,
)
from penstock_client.models.results import (
    Evaluation,
    PassRate,
    RolloutStep,
    RunComparison,
    SettingDifference,
    StepList,
    reward_metric,
    reward_names,
)
from penstock_client.models.runs import (
    GroupFigures,
    LiveProcess,
    OpenWait,
    Run,
    RunEntries,
    RunEntry,
    RunEvent,
    SettingsEdit,
    StateChange,
    WaitEntry,
)

__all__ = [
    "ApiModel",
    "AuditEntryView",
    "AuditList",
    "CheckpointEntries",
    "ClosedEntries",
    "DeadLetterEntry",
    "Evaluation",
    "ExportedFiles",
    "FaultList",
    "GroupFigures",
    "Identity",
    "LiveProcess",
    "OpenWait",
    "PassRate",
    "ProcessLog",
    "ProcessLogLine",
    "ProcessLogPage",
    "ProcessLogs",
    "Project",
    "ProjectPage",
    "ProjectUse",
    "QueuedEntry",
    "RolloutStep",
    "Run",
    "RunComparison",
    "RunEntries",
    "RunEntry",
    "RunEvent",
    "RunHappening",
    "RunQueue",
    "RunStory",
    "SettingDifference",
    "SettingsEdit",
    "StateChange",
    "StepList",
    "StoredCheckpoint",
    "StoredFile",
    "UnclosedRun",
    "UnknownVerdictEntry",
    "WaitEntry",
    "reward_metric",
    "reward_names",
]
