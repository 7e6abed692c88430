"""Owns the merging of the archive's files: many small ones become one, so that a reader opens few.

Must not change a row, nor run in two processes for one run: the sampler, of which there is one, merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.storage.groups.columns import joined
from services.storage.groups.listing import CACHE
from services.storage.groups.parts import Part, delete_parts, list_parts, write_table
from services.storage.mirror import Mirror

TOGETHER = 16
"""Files of one lane and level that become one of the next level."""
TOP_LEVEL = 2
MOST_BYTES = 64 << 20
"""Of the files that are merged at once: all of them are in memory."""


def next_merge(parts: Sequence[Part]) -> list[Part]:
    """The files to be merged next, which follow each other in time; [] if there are too few. `parts`: oldest first."""
    for level in range(TOP_LEVEL):
        for evaluation in (False, True):
            same = [each for each in parts if each.level == level and each.evaluation is evaluation]
            for start in range(len(same) - TOGETHER + 1):
                chosen = same[start : start + TOGETHER]
                if sum(part.size for part in chosen) <= MOST_BYTES:
                    return chosen
    return []


def merge_once(folder: Path, mirror: Mirror) -> bool:
    """Merge the next files, if there are enough; whether it did. Interrupted, it leaves rows twice, and none less.

    Raises StoreError, OSError, pyarrow's errors for a damaged file.
    """
    chosen = next_merge(list_parts(folder, mirror))
    if not chosen:
        return False
    place = folder / CACHE if mirror.remote else folder
    mirror.fetch({part.path: part.size for part in chosen}, place)
    table = joined([pq.ParquetFile(place / part.path).read() for part in chosen])
    write_table(folder, mirror, _newest(table), chosen[0].level + 1)
    delete_parts(place, mirror, chosen)
    return True


def _newest(table: pa.Table) -> pa.Table:
    """The rows by group; of one attempt that was written twice, the newest."""
    keys = [("group", "ascending"), ("resumption", "ascending"), ("archived_ms", "ascending")]
    ordered = table.take(pc.sort_indices(table, sort_keys=keys))
    attempts = list(zip(ordered.column("group").to_pylist(), ordered.column("resumption").to_pylist(), strict=True))
    kept = [at for at, attempt in enumerate(attempts) if at + 1 == len(attempts) or attempts[at + 1] != attempt]
    return ordered.take(pa.array(kept, pa.int64()))
