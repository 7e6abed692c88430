"""Owns the calls that add, change and end runs.

Must not repeat a call by itself: only a submission has a key by which the API knows a repetition.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from penstock_client.answers import as_model
from penstock_client.calls.base import ApiCalls, of
from penstock_client.models import ClosedEntries, FaultList, Run, RunEntry
from penstock_client.transport import ANSWER_S


class RunChanging(ApiCalls):
    """Calls that change runs."""

    def submit(
        self,
        recipe: Mapping[str, Any],
        run: str | None = None,
        files: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        **fields: Any,
    ) -> Run:
        """Submit a run with the texts of the files that its recipe names; its `warnings` did not prevent it.

        `key`: the Idempotency-Key, a random one by default; give the same to repeat a submission whose answer was lost.
        `fields`: further fields of the request, such as `project`; those that are None are left out.
        """
        body = {"recipe": dict(recipe), "id": run, "files": dict(files or {}) or None, **fields}
        answer = self._http.call(
            "POST",
            "/v1/runs",
            body={name: value for name, value in body.items() if value is not None},
            headers={"idempotency-key": key or secrets.token_hex(16)},
        )
        return self._run(answer)

    def check(self, recipe: Mapping[str, Any], files: Mapping[str, str] | None = None) -> list[str]:
        """What a submission of the recipe would be refused for, one line per fault; nothing is submitted."""
        body = {"recipe": dict(recipe), "files": dict(files or {})}
        return as_model(self.url, FaultList, self.call("POST", "/v1/recipes/check", body)).faults

    def clone(
        self, run: str, overrides: Mapping[str, Any] | None = None, *, key: str | None = None, **fields: Any
    ) -> Run:
        """Submit a copy of a run with other values of its recipe, by dotted names; `key`, `fields`: see `submit`."""
        body = {"overrides": dict(overrides or {}), **fields}
        answer = self._http.call(
            "POST",
            of(run, "/clone"),
            body={name: value for name, value in body.items() if value is not None},
            headers={"idempotency-key": key or secrets.token_hex(16)},
        )
        return self._run(answer)

    def adopt(self, run: str, project: str | None = None) -> Run:
        """Take over a run whose record Redis has lost, from its folder or the store; it can be resumed then."""
        body = {"id": run, "project": project}
        return self._run(
            self.call("POST", "/v1/runs/adopt", {name: value for name, value in body.items() if value is not None})
        )

    def edit(self, run: str, changes: Mapping[str, Any]) -> Run:
        """Change settings of a run in flight, by their dotted names in the recipe; `priority` is the run's."""
        return self._run(self.call("PATCH", of(run), dict(changes)))

    def cancel(self, run: str, timeout_s: float = ANSWER_S) -> RunEntry:
        """Cancel the run."""
        return as_model(self.url, RunEntry, self._http.call("POST", of(run, "/cancel"), timeout_s=timeout_s))

    def pause(self, run: str) -> Run:
        """Pause a running run."""
        return self._run(self.call("POST", of(run, "/pause")))

    def resume(
        self, run: str, *, from_step: int | None = None, learner_ranks: int | None = None, rollout: int | None = None
    ) -> Run:
        """Resume a paused run, or queue a failed or cancelled one again; what is None keeps its value."""
        changes = {"from_step": from_step, "learner_ranks": learner_ranks, "rollout": rollout}
        return self._run(self.call("POST", of(run, "/resume"), changes))

    def scale(self, run: str, rollout: int | None = None, verifier: int | None = None) -> Run:
        """Change the desired number of rollout replicas, of verifiers, or of both; what is None keeps its value."""
        wanted = {"rollout": rollout, "verifier": verifier}
        changes = {name: count for name, count in wanted.items() if count is not None}
        return self._run(self.call("PATCH", of(run, "/scale"), changes))

    def archive(self, run: str) -> RunEntry:
        """Free the memory of a run that has ended; it can no longer be resumed."""
        return as_model(self.url, RunEntry, self.call("POST", of(run, "/archive")))

    def archive_older(self, older_than_s: float, *, dry_run: bool = False, **wanted: Any) -> ClosedEntries:
        """Archive runs that ended so long ago, the oldest first; with `dry_run` only find them.

        `wanted`: `state` (some states) and `project`.
        """
        flag = str(dry_run).lower()
        found = self.call("POST", "/v1/runs/archive", older_than=older_than_s, dry_run=flag, **wanted)
        return as_model(self.url, ClosedEntries, found)

    def delete_older(
        self, older_than_s: float, *, files: bool = False, dry_run: bool = False, **wanted: Any
    ) -> ClosedEntries:
        """Delete runs that ended so long ago, and with `files` their files; otherwise as `archive_older`."""
        flags = {"files": str(files).lower(), "dry_run": str(dry_run).lower()}
        found = self.call("DELETE", "/v1/runs", older_than=older_than_s, **flags, **wanted)
        return as_model(self.url, ClosedEntries, found)

    def delete(self, run: str, files: bool = False) -> RunEntry:
        """Delete the run, and with `files` its files; the controller does it later."""
        return as_model(self.url, RunEntry, self.call("DELETE", of(run), files=str(files).lower()))
