// Owns the lists of a run's checkpoints and of its export, and their download.
import { html } from "../../vendor/vendor.js";
import { download, get, runPath } from "../../app/api.js";
import { bytes } from "../../app/format.js";
import { useLoaded } from "../../app/live.js";
import { Loaded, Table } from "../../parts/common.js";
import { say } from "../../parts/toasts.js";

export function Files({ view }) {
  const checkpoints = useLoaded((signal) => get(runPath(view.id, "/checkpoints"), {}, { signal }), [view.id], 10000);
  const exported = useLoaded((signal) => get(runPath(view.id, "/export"), {}, { signal }), [view.id], 10000);
  const save = (path, name) => download(path, name.split("/").at(-1)).catch((error) => say(error.message, "bad"));
  const columns = [
    ["File", (file) => html`<code>${file.name}</code>`, { head: true }], ["Size", (file) => bytes(file.size), { number: true }],
    ["", (file) => html`<button type="button" onClick=${() => save(runPath(view.id, `/export/${file.name.split("/").map(encodeURIComponent).join("/")}`), file.name)}>Download<span class="hidden"> ${file.name}</span></button>`],
  ];
  return html`<h2>Checkpoints</h2><${Loaded} of=${checkpoints} what="the checkpoints">${(found) => html`<${Table} caption="Checkpoints" rows=${found.checkpoints} keyOf=${({ name }) => name}
      columns=${[["Checkpoint", ({ name }) => html`<code>${name}</code>`, { head: true }], ["Step", ({ step }) => step, { number: true }], ["Files", ({ files }) => files.length, { number: true }], ["Size", ({ files }) => bytes(files.reduce((sum, { size }) => sum + size, 0)), { number: true }]]} empty="No checkpoint is complete yet." />`}<//>
    <h2>Export</h2><${Loaded} of=${exported} what="the export">${(found) => html`<${Table} caption="Exported model" rows=${found.files} keyOf=${({ name }) => name} columns=${columns} empty="The model is exported at the end of the run." />`}<//>`;
}
