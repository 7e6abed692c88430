"""Owns the platform's access file: tokens, projects with their quotas, the issuer of OpenID Connect, audit retention.

Must not hold a token, only digests; nor quote what stands in place of a digest, which may be a token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AwareDatetime, Field, StringConstraints, ValidationError, field_validator, model_validator

from services.settings.base import Positive, Section
from services.settings.faults import explained, invalid
from services.streams.state.run_record import DEFAULT_PROJECT

VARIABLE = "PENSTOCK_ACCESS"
EVERY_PROJECT = "*"
MOST_BYTES = 2**20
PROJECT = r"^[a-z0-9][a-z0-9-]{0,62}$"
# Without a colon: it marks the names of principals whom an issuer vouches for.
PRINCIPAL = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

RoleWord = Literal["viewer", "operator", "admin"]
Project = Annotated[str, StringConstraints(pattern=PROJECT)]
Roles = dict[Project | Literal["*"], RoleWord]


class AccessFileError(ValueError):
    """The access file cannot be used; one line per fault."""


class TokenEntry(Section):
    """A token: `sha256` is the digest that `penstock token new` prints. `roles`: by project, `*` for all."""

    name: Annotated[str, StringConstraints(pattern=PRINCIPAL)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    roles: Annotated[Roles, Field(min_length=1)]
    expires: AwareDatetime | None = None


class ProjectQuota(Section):
    """What the active runs of a project may use together; null: no limit. `redis_memory`: planned bytes of Redis."""

    gpus: Annotated[float, Field(ge=0)] | None = None
    runs: Annotated[int, Field(ge=0)] | None = None
    redis_memory: Annotated[int, Field(ge=0)] | None = None


class OidcSettings(Section):
    """An issuer of OpenID Connect whose tokens are accepted. `groups`: the roles by project of each group.

    `name_claim`: who it is, in the audit log. `ca_file`: certificates that sign the issuer's, if not public ones.
    """

    issuer: str
    audience: Annotated[str, Field(min_length=1)]
    groups_claim: Annotated[str, Field(min_length=1)] = "groups"
    name_claim: Annotated[str, Field(min_length=1)] = "sub"
    groups: Annotated[dict[str, Roles], Field(min_length=1)]
    ca_file: Path | None = None

    @field_validator("issuer")
    @classmethod
    def _is_protected(cls, issuer: str) -> str:
        return protected_address(issuer)


class AuditSettings(Section):
    """How much of the audit log is kept: entries, and days. What exceeds either is deleted."""

    entries: Positive = 20_000
    days: Positive = 90


class AccessSettings(Section):
    """The whole file. `requests_per_minute`: of one principal, on one pod of the API."""

    tokens: tuple[TokenEntry, ...] = ()
    projects: dict[Project, ProjectQuota] = Field(default_factory=dict)
    oidc: OidcSettings | None = None
    audit: AuditSettings = AuditSettings()
    requests_per_minute: Positive = 20_000

    @model_validator(mode="after")
    def _has_no_duplicates(self) -> AccessSettings:
        for field in ("name", "sha256"):
            counts = Counter(getattr(entry, field) for entry in self.tokens)
            if twice := [value for value, count in counts.items() if count > 1]:
                raise ValueError(f"{field} of tokens: {twice[0][:64]!r} occurs twice: expected each once")
        return self

    def quota(self, project: str) -> ProjectQuota:
        """The quota of a project; without limits if the file does not state any."""
        return self.projects.get(project, ProjectQuota())

    @property
    def known_projects(self) -> frozenset[str]:
        """The projects that the file names, and the default one."""
        granted = [entry.roles for entry in self.tokens] + list(self.oidc.groups.values() if self.oidc else ())
        named = {project for roles in granted for project in roles if project != EVERY_PROJECT}
        return frozenset({DEFAULT_PROJECT, *self.projects, *named})


def protected_address(address: str) -> str:
    """An address whose answers only its server can have written. Raises ValueError for any other one."""
    parts = urlsplit(address)
    if parts.scheme == "https" and parts.hostname:
        return address
    if parts.scheme == "http" and parts.hostname in LOOPBACK:
        return address
    raise ValueError(f"{address[:200]!r} is not valid: expected an https address")


def load_access(path: Path) -> AccessSettings:
    """The access file at `path`, YAML or JSON. Raises AccessFileError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise AccessFileError(invalid(VARIABLE, str(path), f"a readable file ({error.strerror})")) from None
    if len(text) > MOST_BYTES:
        raise AccessFileError(invalid(VARIABLE, str(path), f"a file of at most {MOST_BYTES} bytes"))
    return parse_access(_document(text, path))


def _document(text: bytes, path: Path) -> Any:
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        # Its text would quote the file.
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise AccessFileError(invalid(VARIABLE, str(path), f"a file of YAML or JSON{line}")) from None


def parse_access(document: Any) -> AccessSettings:
    """The settings of a document. Raises AccessFileError with one line per fault."""
    if not isinstance(document, Mapping):
        raise AccessFileError(f"{VARIABLE}: the file is not valid: expected a mapping with `tokens` or `oidc`")
    try:
        return AccessSettings.model_validate(document)
    except ValidationError as error:
        raise AccessFileError("\n".join(_line(fault) for fault in error.errors())) from None


def _line(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"]) or "file"
    if where.startswith("tokens.") and where.endswith("sha256"):
        return f"{where}: the value is not valid: expected 64 hexadecimal digits, as `penstock token new` prints them"
    return explained(where, {**fault, "input": str(fault.get("input"))[:200]})[:500]
