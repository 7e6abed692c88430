"""Owns the REST routes of a run's checkpoints and its export: listed, and downloaded file by file.

Must not serve any other file of a run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.api.answers.problems import refusal
from services.api.dependencies import ViewedRun
from services.api.guard.redis_deadline import beyond_redis
from services.api.routes.reading import stored_files
from services.api.routes.reading.stored_files import MissingFileError, Readable
from services.api.views.reading.files import CheckpointList, CheckpointView, FileList, FileView

CHECKPOINTS, EXPORT = "checkpoints", "export"
CHECKPOINT = "checkpoint.json"
"""The manifest of a checkpoint, written last."""
EXPORTED = ".penstock.json"
"""The manifest of an export in a store."""
NAME = re.compile(r"step-[0-9]{6,12}[A-Za-z0-9._-]{0,200}")
CHUNK = 1 << 20
BYTES = {"schema": {"type": "string", "format": "binary"}}
BINARY: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": BYTES}}}
PART: dict[int | str, dict[str, Any]] = {206: {"description": "The asked range.", **BINARY[200]}}
_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})", re.ASCII)

READER = ThreadPoolExecutor(1, "digests")
"""Whole files are read one after the other: those who ask for digests leave the other threads to other requests."""

Range = Annotated[str | None, Header(alias="range", description="one range of bytes; others are ignored")]
IfRange = Annotated[str | None, Header(description="the entity tag of which the range is a part; else the whole file")]

router = APIRouter(prefix="/v1/runs", tags=["files"])


@router.get("/{run}/checkpoints")
async def list_checkpoints(request: Request, record: ViewedRun) -> CheckpointList:
    """The run's whole checkpoints with their files, sizes and digests, from its folder or the store."""
    beyond_redis(request)
    return CheckpointList(checkpoints=await asyncio.to_thread(_checkpoints, record.id))


@router.get("/{run}/checkpoints/{name}/{file:path}", response_class=Response, responses={**BINARY, **PART})
async def download_checkpoint_file(
    request: Request, record: ViewedRun, name: str, file: str, asked: Range = None, if_range: IfRange = None
) -> Response:
    """One file of a checkpoint, or a range of it."""
    beyond_redis(request)
    if not NAME.fullmatch(name):
        raise MissingFileError(f"checkpoint {name[:200]!r} does not exist")
    return await _download(record.id, f"{CHECKPOINTS}/{name}/{file}", asked, if_range)


@router.get("/{run}/export")
async def list_export(
    request: Request,
    record: ViewedRun,
    digests: Annotated[bool, Query(description="compute digests that are not recorded: reads every file")] = False,
) -> FileList:
    """The files of the run's export, with sizes and digests, from its folder or the store."""
    beyond_redis(request)
    if record.export_path is None:
        return FileList(place=None, files=[])
    reader = READER if digests else None
    files = await asyncio.get_running_loop().run_in_executor(reader, _exported, record.id, digests)
    return FileList(place=record.export_path, files=files)


@router.get("/{run}/export/{file:path}", response_class=Response, responses={**BINARY, **PART})
async def download_exported_file(
    request: Request, record: ViewedRun, file: str, asked: Range = None, if_range: IfRange = None
) -> Response:
    """One file of the run's export, or a range of it."""
    beyond_redis(request)
    if record.export_path is None:
        raise MissingFileError(f"run {record.id!r} has no export")
    return await _download(record.id, f"{EXPORT}/{file}", asked, if_range)


def _checkpoints(run: str) -> list[CheckpointView]:
    by_name: dict[str, dict[str, int]] = {}
    for path, size in stored_files.listed(run, CHECKPOINTS).items():
        name, _, file = path.partition("/")
        by_name.setdefault(name, {})[file] = size
    found = [_checkpoint(run, name, files) for name, files in by_name.items() if NAME.fullmatch(name)]
    return sorted((view for view in found if view), key=lambda view: (view.step, view.version))


def _checkpoint(run: str, name: str, files: dict[str, int]) -> CheckpointView | None:
    """None for one that is being written, or whose manifest is damaged."""
    if CHECKPOINT not in files:
        return None
    manifest = stored_files.manifest_of(run, f"{CHECKPOINTS}/{name}/{CHECKPOINT}")
    step, version = manifest.get("step"), manifest.get("version")
    if not isinstance(step, int) or not isinstance(version, int):
        return None
    return CheckpointView(name=name, step=step, version=version, files=_views(files, stored_files.digests_in(manifest)))


def _exported(run: str, digests: bool) -> list[FileView]:
    files = {name: size for name, size in stored_files.listed(run, EXPORT).items() if name != EXPORTED}
    known = stored_files.digests_in(stored_files.manifest_of(run, f"{EXPORT}/{EXPORTED}"))
    if digests:
        for name in files.keys() - known.keys():
            if digest := stored_files.digest_here(run, f"{EXPORT}/{name}"):
                known[name] = digest
    return _views(files, known)


def _views(files: dict[str, int], digests: dict[str, str]) -> list[FileView]:
    return [FileView(name=name, size=size, sha256=digests.get(name)) for name, size in sorted(files.items())]


async def _download(run: str, name: str, asked: str | None, if_range: str | None) -> Response:
    file = await asyncio.to_thread(stored_files.opened, run, name)
    same = if_range in (None, f'"{file.tag}"')
    return FileDownload(file, name, asked if same else None)


class FileDownload(StreamingResponse):
    """A file, or one range of it; 416 for a range that it does not have. Closes the file however the download ends."""

    def __init__(self, file: Readable, name: str, asked: str | None) -> None:
        self._file = file
        self._span = span_of(asked, file.size)
        start, end = self._span or (0, 0)
        headers = {
            "accept-ranges": "bytes",
            "content-length": str(end - start),
            "content-disposition": f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "_", name.rpartition("/")[2])}"',
            "etag": f'"{file.tag}"',
        }
        partial = (start, end) != (0, file.size)
        if partial:
            headers["content-range"] = f"bytes {start}-{end - 1}/{file.size}"
        super().__init__(
            self._chunks(start, end), 206 if partial else 200, headers, media_type="application/octet-stream"
        )

    async def _chunks(self, start: int, end: int) -> AsyncIterator[bytes]:
        while start < end:
            chunk = await asyncio.to_thread(self._file.read, start, min(CHUNK, end - start))
            if not chunk:
                raise RuntimeError(f"a file ended at {start} of {self._file.size} bytes while it was sent")
            start += len(chunk)
            yield chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it (the interface of ASGI applications)."""
        try:
            if self._span is None:
                text = f"range: the file has {self._file.size} bytes: expected a range of them"
                refused = refusal(scope, 416, text, {"content-range": f"bytes */{self._file.size}"})
                await refused(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
        finally:
            self._file.close()


def span_of(asked: str | None, size: int) -> tuple[int, int] | None:
    """Start and end of the bytes that a Range header asks for; None if the file has none of them (RFC 9110)."""
    found = _RANGE.fullmatch(asked or "")
    if found is None or not (found["first"] or found["last"]):
        return 0, size  # no range, several ranges, or another unit: the whole file
    if not found["first"]:
        length = int(found["last"])
        return (max(0, size - length), size) if length and size else None
    first = int(found["first"])
    last = int(found["last"]) if found["last"] else size - 1
    if found["last"] and last < first:
        return 0, size  # not valid, and so ignored
    return (first, min(last + 1, size)) if first < size else None
