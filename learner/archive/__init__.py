"""Owns a run's folder: the names, the format and the safe deletion of what a learner writes there.

Must not import torch, Redis or an engine: it is read without a gateway, even long after the run.
"""

from learner.archive.files import ArchiveError, atomic_file, read_message, write_message
from learner.archive.names import CHECKPOINTS, DIFFERS, FACTS, FIRST_STEP, owned_name, step_name, writer_of, written_by
from learner.archive.run_archive import RunArchive, RunFacts, run_folder

__all__ = [
    "CHECKPOINTS",
    "DIFFERS",
    "FACTS",
    "FIRST_STEP",
    "ArchiveError",
    "RunArchive",
    "RunFacts",
    "atomic_file",
    "owned_name",
    "read_message",
    "run_folder",
    "step_name",
    "write_message",
    "writer_of",
    "written_by",
]
