"""Owns the sizes of a run's fleets: as requested, that of rollout within the cluster's limits.

Must not start or stop replicas itself; it asks the cluster.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from services.contracts import ProcessInfo
from services.controller.fleet.capacity import beside
from services.controller.retry import RetriedRequest
from services.controller.run_context import FLEET_WAIT, RunContext
from services.settings import ClusterLimitsError, load_cluster_limits
from services.settings.rewards.limits import verifier_role
from services.streams.runs.places import AVOIDED
from services.streams.state.run_record import RunRecord

log = logging.getLogger(__name__)

SCALING_S = 60.0


class FleetScaling:
    """The numbers of replicas of one run. `replicas`, `verifiers`: those last requested from the cluster."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._scaling = self._request("rollout", "scaling-again")
        self._scaling_verifiers = self._request("verifier", "verifier-scaling-again")
        self._reported = ""
        self.replicas = self.verifiers = 0
        self._held: Counter[str] = Counter()  # replicas that hold avoided places, by service
        self._processes = self._verifier_processes = 0  # all that were requested

    def _request(self, fleet: str, wait: str) -> RetriedRequest:
        failure = f"the {fleet} fleet could not be scaled"
        context = self._context
        return RetriedRequest(context.event_log, context.waits, phase="scaling-failed", failure=failure, wait=wait)

    async def set_initial(self, record: RunRecord, processes: list[ProcessInfo]) -> RunRecord:
        """The record with the number of replicas to start with. `processes`: those of the run that live already."""
        self.replicas, self.verifiers = self._allowed(record), record.recipe.verifier.replicas
        self._held = _holding(processes)
        self._processes = await self._with_held(record, "rollout", self.replicas, self._processes)
        self._verifier_processes = self.verifiers
        return replace(record, rollout_replicas=self._processes)

    def sized(self, record: RunRecord) -> RunRecord:
        """The record with the number of replicas that are to work now in place of its own."""
        return replace(record, rollout_replicas=self.replicas)

    async def scale(self, record: RunRecord, processes: list[ProcessInfo]) -> None:
        """Ask the cluster for the requested replicas, if their number changed or the last request failed.

        A replica that holds an avoided place does no work, so another one is requested for it, within the limits.
        """
        self._held = _holding(processes)
        await self._scale_rollout(record)
        await self._scale_verifiers(record)

    async def _scale_rollout(self, record: RunRecord) -> None:
        replicas, wanted = self._allowed(record), record.rollout_replicas
        if replicas != self.replicas:
            limited = f" ({wanted} are requested; the cluster's limits allow no more)" if replicas < wanted else ""
            await self._context.event_log.write("scaling", f"rollout {self.replicas} -> {replicas} replicas{limited}")
            self.replicas = replicas
        processes = await self._with_held(record, "rollout", replicas, self._processes)
        if processes == self._processes and not self._scaling.retry_pending:
            return
        if processes != self._processes:
            await self._report_held("rollout", processes, replicas)
        self._processes = processes
        if not self._scaling.due:
            return
        async with self._scaling:
            with self._context.waits.on("scaling", f"the fleet to be scaled to {processes} replicas", SCALING_S):
                await self._context.cluster.scale_rollout(self._context.run, processes)

    async def _scale_verifiers(self, record: RunRecord) -> None:
        context, request, wanted = self._context, self._scaling_verifiers, record.recipe.verifier.replicas
        if wanted != self.verifiers:
            await context.event_log.write("scaling", f"verifier {self.verifiers} -> {wanted} replicas")
            self.verifiers = wanted
        processes = await self._with_held(record, "verifier", wanted, self._verifier_processes)
        if processes == self._verifier_processes and not request.retry_pending:
            return
        if processes != self._verifier_processes:
            await self._report_held("verifier", processes, wanted)
        self._verifier_processes = processes
        if request.due:
            async with request:
                with context.waits.on("scaling", f"the verifiers to be scaled to {processes} replicas", SCALING_S):
                    await context.cluster.scale_verifier(context.run, processes)

    async def _report_held(self, service: str, processes: int, replicas: int) -> None:
        if processes > replicas:
            held = f"{self._held[service]} {service} replicas hold avoided places"
            text = f"{held}; {processes} are requested instead of {replicas}"
            await self._context.event_log.write("scaling", text)

    def complete(self, processes: list[ProcessInfo]) -> bool:
        """Whether as many rollout replicas are ready as were requested last, less those that hold avoided places."""
        ready = sum(process.service == "rollout" and process.state == "ready" for process in processes)
        return ready >= max(1, self.replicas - _holding(processes)["rollout"])

    async def show(self, record: RunRecord, processes: list[ProcessInfo]) -> None:
        """Show the fleets in the metrics, and wait for replicas that are not ready, also while the run is paused."""
        await self._context.metrics.show(self.sized(record), processes)
        ready = Counter(process.service for process in processes if process.state == "ready")
        # Those that hold avoided places are no stall: the run's alerts have the places.
        held, replicas = _holding(processes), {"rollout": self.replicas, "verifier": record.recipe.verifier.replicas}
        wanted = {name: max(1, count - held[name]) for name, count in replicas.items()}
        lacking = [f"{name} ({ready[name]} of {count} ready)" for name, count in wanted.items() if ready[name] < count]
        if lacking:
            text = f"replicas of {' and '.join(lacking)}"
            self._context.waits.pending(FLEET_WAIT, text, record.recipe.limits.startup_timeout_s)
        else:
            self._context.waits.done(FLEET_WAIT)

    def _allowed(self, record: RunRecord) -> int:
        """The number of rollout replicas to run: as requested, within the cluster's limits as they are now."""
        try:
            most = self._most(record)
        except ClusterLimitsError as error:
            if (text := str(error)) != self._reported:
                log.warning("%s; the fleet of run %s keeps %d replicas", text, self._context.run, self.replicas)
                self._reported = text
            return self.replicas or record.rollout_replicas
        self._reported = ""
        return record.rollout_replicas if most is None else max(1, min(most, record.rollout_replicas))

    async def _with_held(self, record: RunRecord, service: str, replicas: int, before: int) -> int:
        """The number of replicas to request, so that `replicas` work if there is room beside those that only hold.

        `before`: the number requested last. Other runs keep their room. Without GPUs a place is a whole node, with room
        for many replicas that only hold: no more than twice the replicas are requested.
        """
        recipe, held = record.recipe, self._held[service]
        if not held:
            return replicas
        gpus = recipe.rollout.gpus if service == "rollout" else 0.0
        wanted = replicas + (held if gpus else min(held, replicas))
        try:
            limits = load_cluster_limits()
        except ClusterLimitsError:
            return before or replicas  # _allowed reports it
        if limits is None:
            return wanted
        role = verifier_role(recipe.rewards) if service == "verifier" else service
        return beside(limits, record, await self._context.records.active(), role, replicas, wanted)

    @staticmethod
    def _most(record: RunRecord) -> int | None:
        limits = load_cluster_limits()
        return limits.most_replicas(record.recipe) if limits else None


def _holding(processes: list[ProcessInfo]) -> Counter[str]:
    """How many replicas hold avoided places, by service."""
    return Counter(process.service for process in processes if process.state == AVOIDED)
