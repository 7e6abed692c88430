"""Owns the calls that list and download a run's checkpoints and its export.

Must not leave a file that is not whole under its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from penstock_client.answers import as_model
from penstock_client.calls.base import ApiCalls, of
from penstock_client.errors import ApiError, NotThePlatformError
from penstock_client.models import CheckpointEntries, ExportedFiles, StoredCheckpoint, StoredFile

PARTIAL = ".partial"
CHUNK = 1 << 20


class RunFiles(ApiCalls):
    """Calls about the files of runs."""

    def checkpoints(self, run: str) -> list[StoredCheckpoint]:
        """The whole checkpoints of a run, by step."""
        return as_model(self.url, CheckpointEntries, self.call("GET", of(run, "/checkpoints"))).checkpoints

    def exported(self, run: str) -> ExportedFiles:
        """The files of a run's export."""
        return as_model(self.url, ExportedFiles, self.call("GET", of(run, "/export")))

    def download_export(
        self, run: str, file: StoredFile, folder: Path, progress: Callable[[int], object] = lambda _: None
    ) -> bool:
        """Download a file of the export to `folder`; False if it is there, whole. Raises ApiError, OSError.

        `progress`: is called with the size of each part, in bytes, as it comes.
        """
        target = folder / _inside(file.name)
        if _is_whole(target, file):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + PARTIAL)
        digest = hashlib.sha256()
        try:
            with partial.open("wb") as opened:
                for part in self._http.parts(of(run, f"/export/{quote(file.name)}")):
                    digest.update(part)
                    opened.write(part)
                    progress(len(part))
            if partial.stat().st_size != file.size or file.sha256 not in (None, digest.hexdigest()):
                raise ApiError(f"{file.name}: what was downloaded is not what the API lists: try again")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return True


def _inside(name: str) -> Path:
    """The name as a relative path. Raises NotThePlatformError for one that leads out of a folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise NotThePlatformError(f"the name of a file is not valid: {name[:200]!r}: expected a path below a folder")
    return Path(*parts)


def _is_whole(path: Path, file: StoredFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size or file.sha256 is None:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while part := opened.read(CHUNK):
            digest.update(part)
    return digest.hexdigest() == file.sha256
