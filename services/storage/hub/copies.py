"""Owns copies of models and data of the hub: fetched once, kept in the store if there is one, the same for every node.

Must not connect to the hub itself: the program that does has HF_TOKEN and is online, services' processes are neither.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from services.storage.errors import StoreError, StoreOutageError
from services.storage.facts import digest_of
from services.storage.folders import MANIFEST, FolderManifest, add_folder, fetch_folder
from services.storage.hub.address import COMMIT, SCHEME, HubAddress, Kind, parse_hub
from services.storage.hub.request import DownloadAnswer, DownloadRequest
from services.storage.hub.selection import CONFIG
from services.storage.places import StoreAddress, configured_store

log = logging.getLogger(__name__)

DOWNLOAD_S = 600.0
"""How long a download may take where no recipe says it, in seconds. The next attempt keeps the complete files."""
OFFLINE = "PENSTOCK_HUB_OFFLINE"
"""What HF_HUB_OFFLINE was before Penstock set it for its services; unset: HF_HUB_OFFLINE itself counts."""
STORED_BELOW: dict[Kind, str] = {"model": "models", "dataset": "inputs"}


def pinned_name(text: str, field: str, kind: Kind, cache: Path, deadline_s: float = DOWNLOAD_S) -> str:
    """Put what a recipe's `field` names into `cache` and the store; returns its name for the record.

    Taken from the store if it is there, else downloaded within `deadline_s` seconds and put into the store.
    The name has the commit and the digest: every node and every later process gets the same files by it, whatever the
    revision is by then. Raises StoreError, OSError.
    """
    address = parse_hub(text, field, kind)
    if not text.startswith(SCHEME) and Path(text).exists():
        raise StoreError(
            f"{field}: {text!r} is ambiguous: a folder of the hub and a local path; expected ./{text} or {SCHEME}..."
        )
    ends = time.monotonic() + deadline_s
    asked = address
    if configured_store() and not COMMIT.fullmatch(address.revision):
        # A commit is needed to find the copy in the store.
        address = _downloaded(address, text, field, cache, deadline_s, only_commit=True)
    _take_from_store(address, cache)
    found = _downloaded(address, text, field, cache, ends - time.monotonic())
    if asked.digest and found.digest != asked.digest:
        raise _changed(text, field, found.digest)
    _put_into_store(found, cache)
    return str(found)


def pinned_data(fields: dict[str, str], cache: Path, deadline_s: float) -> dict[str, str]:
    """The names for the record of data sets, by their text in the recipe, as its `fields` are too. See pinned_name.

    `deadline_s`: for all of them together.
    """
    ends = time.monotonic() + deadline_s
    return {text: pinned_name(text, field, "dataset", cache, ends - time.monotonic()) for text, field in fields.items()}


def hub_copy(name: str, field: str, kind: Kind, cache: Path) -> Path:
    """The folder or file on this node of what a record names, taken from the store if it is not there yet.

    Never downloaded: only preparation has the token and a connection. Raises StoreError, OSError.
    """
    address = parse_hub(name, field, kind)
    _take_from_store(address, cache)
    if not _folder(address, cache).exists():
        raise StoreError(
            f"{field}: {name!r} has no copy in {cache} nor in a store; resume the run to download it again"
        )
    if (digest := _digest(_folder(address, cache), field)) != address.digest:
        raise _changed(name, field, digest)
    return _folder(address, cache) / address.path


def hub_config(text: str, cache: Path) -> Path:
    """The folder with the config.json alone of a recipe's model.path. Raises StoreError, OSError."""
    address = parse_hub(text, "model.path", "model")._replace(path=CONFIG, digest="")
    found = _downloaded(address, text, "model.path", cache, DOWNLOAD_S)
    return _folder(found, cache)


def _folder(address: HubAddress, cache: Path) -> Path:
    return cache / address.folder / address.name


def _downloaded(
    address: HubAddress, shown: str, field: str, cache: Path, deadline_s: float, *, only_commit: bool = False
) -> HubAddress:
    """The address with commit and digest, once its files are in `cache`; with `only_commit`, the commit alone."""
    what = DownloadRequest(**address._asdict(), cache=str(cache), only_commit=only_commit)
    command = [sys.executable, "-m", "services.storage.hub.download", what.model_dump_json()]
    try:
        # Its standard error is this process's own: the log lines of the download.
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=max(0.0, deadline_s), check=False, env=_environment()
        )
    except subprocess.TimeoutExpired:
        raise StoreOutageError(
            f"{field}: {shown!r} was not downloaded within {max(0.01, deadline_s):.3g} s; "
            "the next attempt keeps the files that are complete"
        ) from None
    try:
        answer = DownloadAnswer.model_validate_json(done.stdout)
    except ValidationError:
        raise StoreError(f"{field}: {shown!r}: its download failed (status {done.returncode}); see the log") from None
    if answer.error:
        kind = StoreOutageError if answer.outage else StoreError
        raise kind(f"{field}: {shown!r} cannot be downloaded: {answer.error}")
    return address._replace(revision=answer.commit, digest=answer.digest)


def _environment() -> dict[str, str]:
    """The variables of the program: as this process's own, but online, unless the operator wants no connection."""
    offline = os.environ.get(OFFLINE, os.environ.get("HF_HUB_OFFLINE", ""))
    # HF_DEBUG would log every request with its headers.
    unset = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    patience = {"HF_HUB_DOWNLOAD_TIMEOUT": "30", "HF_HUB_ETAG_TIMEOUT": "30"}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    # The program must be found from any folder, as this code was.
    paths = (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(path for path in paths if path)
    return patience | kept | quiet | {"HF_HUB_OFFLINE": offline, "PYTHONPATH": path}


def _in_store(address: HubAddress) -> StoreAddress | None:
    """Where the store keeps the files: beside the folders of runs, below a name that no run may have."""
    store = configured_store()
    return store / STORED_BELOW[address.kind] / address.folder / address.name if store else None


def _take_from_store(address: HubAddress, cache: Path) -> None:
    if not _folder(address, cache).exists() and (at := _in_store(address)):
        fetch_folder(at, cache / address.folder, address.name)


def _put_into_store(address: HubAddress, cache: Path) -> None:
    if (at := _in_store(address)) and add_folder(at, _folder(address, cache)):
        log.info("%s is in the store as %s", address, at)


def _digest(folder: Path, field: str) -> str:
    try:
        files = FolderManifest.model_validate_json((folder / MANIFEST).read_bytes()).files
    except (ValidationError, FileNotFoundError):
        raise StoreError(f"{field}: {folder / MANIFEST} is damaged; delete {folder.parent}") from None
    return digest_of(files or {})


def _changed(name: str, field: str, digest: str) -> StoreError:
    return StoreError(f"{field}: {name!r} has other files than when the run started (digest {digest})")
