"""Owns addresses of repositories on the Hugging Face Hub, as recipes and the records of runs write them.

Must not connect to the hub. The syntax of `hf://` is that of huggingface_hub.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

from services.storage.errors import StoreError

SCHEME = "hf://"
MAIN = "main"
SHOWN = 200
"""Characters of an address that an error shows."""
Kind = Literal["model", "dataset"]
PREFIXES: dict[Kind, str] = {"model": "", "dataset": "datasets/"}
"""What an address has before the repository, by kind; `models/` is accepted too."""
EXPECTED: dict[Kind, str] = {
    "model": "ORG/NAME@REVISION or hf://ORG/NAME@REVISION",
    "dataset": "ORG/NAME@REVISION/PATH or hf://datasets/ORG/NAME@REVISION/PATH",
}
NAME = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
REVISION = r"refs/pr/\d+|refs/convert/[\w.-]+|[^\s/@#]+"
PLACE = rf"(?P<repository>{NAME}/{NAME})(?:@(?P<revision>{REVISION}))?(?:/(?P<path>[^#]+))?"
SHORT = re.compile(rf"(?=[^/@]+/[^/@]+@){PLACE}", re.ASCII)
FULL = re.compile(rf"{SCHEME}(?:(?P<kind>models|datasets)/)?{PLACE}(?:#(?P<digest>[0-9a-f]{{64}}))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubAddress(NamedTuple):
    """A repository at a revision, and a `path` in it: "" is all of it.

    `digest`: of the files' names, sizes and content, in a record; the revision is then a commit. Else "".
    """

    kind: Kind
    repository: str
    revision: str
    path: str = ""
    digest: str = ""

    def __str__(self) -> str:
        """As `hf://[datasets/]ORG/NAME@REVISION[/PATH][#DIGEST]`."""
        revision = self.revision if self.revision.startswith("refs/") else quote(self.revision, safe="")
        path, digest = f"/{self.path}" if self.path else "", f"#{self.digest}" if self.digest else ""
        return f"{SCHEME}{PREFIXES[self.kind]}{self.repository}@{revision}{path}{digest}"

    @property
    def folder(self) -> str:
        """The name of the folder for its files, beside others: one per commit and path."""
        return f"hf-{hashlib.sha256(str(self._replace(digest='')).encode()).hexdigest()[:16]}"

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repository.partition("/")[2]


def is_hub(text: str | None) -> bool:
    """Whether a path of a recipe or a name in a record is on the hub: it starts with hf://, or is ORG/NAME@...

    A path with an @ elsewhere, an absolute one, and one that starts with a dot are not.
    """
    return text is not None and (text.startswith(SCHEME) or SHORT.fullmatch(text) is not None)


def is_pinned(name: str) -> bool:
    """Whether the name of a model or of data in a record is on the hub. Records never have the short form.

    A path with an @ in the record of an older release is an ordinary path.
    """
    return name.startswith(SCHEME)


def parse_hub(text: str, field: str, kind: Kind) -> HubAddress:
    """The address that `text`, the value of `field`, gives. Raises StoreError, which names both."""
    match = FULL.fullmatch(text) or SHORT.fullmatch(text)
    if match is None:
        raise _invalid(text, field, kind, "")
    found = match.groupdict()
    given: Kind = "dataset" if found.get("kind") == "datasets" else "model" if match.re is FULL else kind
    if given != kind:
        raise _invalid(text, field, kind, f"; it is the address of a {given}")
    if re.search(r"\.\.|--", found["repository"]):
        raise _invalid(text, field, kind, "; a name has no '--' and no '..'")
    path = (found["path"] or "").rstrip("/")
    if kind == "model" and path:
        raise _invalid(text, field, kind, f"; a model is a whole repository, without {path!r}")
    if any(part in ("", ".", "..") for part in path.split("/")[: None if path else 0]):
        raise _invalid(text, field, kind, f"; {path!r} is no path in a repository")
    revision = unquote(found["revision"] or MAIN)
    return HubAddress(kind, found["repository"], revision, path, found.get("digest") or "")


def _invalid(text: str, field: str, kind: Kind, fault: str) -> StoreError:
    return StoreError(f"{field}: {text[:SHOWN]!r} is not valid: expected {EXPECTED[kind]}{fault[:SHOWN]}")
