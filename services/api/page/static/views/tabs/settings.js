// Owns the settings of a run as they are in force. Must not change them.
import { html } from "../../vendor/vendor.js";
import { flatten } from "../../app/documents.js";
import { Table } from "../../parts/common.js";

const COLUMNS = [["Setting", ([path]) => html`<code>${path}</code>`, { head: true }], ["Value", ([, value]) => html`<code class="text">${JSON.stringify(value)}</code>`]];

export const Settings = ({ view }) => html`<h2 class="hidden">Settings</h2>
  ${view.recipe ? html`<${Table} caption="The recipe, its preset filled in" columns=${COLUMNS} rows=${flatten(view.recipe)} keyOf=${([path]) => path} />`
    : html`<p class="note">${view.problem}</p>`}
  ${Object.keys(view.files ?? {}).length > 0 && html`<h2>Files beside the recipe</h2><${Table} caption="Files" rows=${Object.entries(view.files)} keyOf=${([name]) => name}
    columns=${[["File", ([name]) => name, { head: true }], ["SHA-256", ([, digest]) => html`<code>${digest}</code>`]]} />`}
  <h2>History</h2><${Table} caption="Changes of state" rows=${view.history} keyOf=${(change) => `${change.at} ${change.state}`}
    columns=${[["Time", (change) => new Date(change.at * 1000).toLocaleString()], ["State", (change) => change.state, { head: true }], ["Reason", (change) => change.reason]]} />`;
