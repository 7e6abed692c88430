// Owns the queue: which runs wait, in which order, and why. Must not change it.
import { html } from "../vendor/vendor.js";
import { get } from "../app/api.js";
import { ago } from "../app/format.js";
import { useLoaded } from "../app/live.js";
import { link } from "../app/router.js";
import { Loaded, Table } from "../parts/common.js";

export function Queue() {
  const queue = useLoaded((signal) => get("/v1/queue", {}, { signal }), [], 3000);
  const columns = [
    ["Position", (run) => run.position, { number: true }],
    ["Run", (run) => html`<a href=${link(["runs", run.id])}>${run.id}</a>`, { head: true }],
    ["Priority", (run) => run.priority, { number: true }],
    ["Queued", (run) => ago(run.since)],
    ["Waits for", (run) => run.waits_for],
  ];
  return html`<h1>Queue</h1><${Loaded} of=${queue} what="the queue">${(found) =>
    html`<${Table} caption="Queued runs, the next one first" columns=${columns} rows=${found.runs} keyOf=${(run) => run.id} empty="No run waits." />`}<//>`;
}
