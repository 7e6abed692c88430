// Owns the queue: which runs wait, in which order, and why; operators change a run's priority here.
import { html, useState } from "../vendor/vendor.js";
import { get } from "../app/api.js";
import { ago } from "../app/format.js";
import { useLoaded } from "../app/live.js";
import { link } from "../app/router.js";
import { roleIn } from "../parts/actions.js";
import { Loaded, Table } from "../parts/common.js";
import { EditSettings } from "../parts/edit.js";

export function Queue({ me }) {
  const [edited, setEdited] = useState("");
  const queue = useLoaded((signal) => get("/v1/queue", {}, { signal }), [], 3000);
  const columns = [
    ["Position", (run) => run.position, { number: true }],
    ["Run", (run) => html`<a href=${link(["runs", run.id])}>${run.id}</a>`, { head: true }],
    ["Priority", (run) => run.priority, { number: true }],
    ["Queued", (run) => ago(run.since)],
    ["Waits for", (run) => html`<span class="clip">${run.waits_for}</span>`],
    ["", (run) => roleIn(me, run.project) >= 2 && html`<button type="button" onClick=${() => setEdited(run.id)}>Priority<span class="hidden"> of ${run.id}</span></button>`],
  ];
  return html`<h1>Queue</h1><${Loaded} of=${queue} what="the queue">${(found) =>
    html`<${Table} caption="Queued runs, the next one first" columns=${columns} rows=${found.runs} keyOf=${(run) => run.id} empty="No run waits." />
    <p class="empty">${found.length > found.runs.length ? `${found.length} runs wait in all, in projects that you cannot see too. ` : ""}A higher priority is placed first; of equal ones, the one that has waited longest.</p>
    ${edited && html`<${EditSettings} run=${edited} only=${["priority"]} close=${() => setEdited("")} done=${queue.again} />`}`}<//>`;
}
