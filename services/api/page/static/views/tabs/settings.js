// Owns the settings of a run as they are in force, and their history. Must not change them.
import { html } from "../../vendor/vendor.js";
import { flatten } from "../../app/documents.js";
import { time } from "../../app/format.js";
import { link } from "../../app/router.js";
import { Table } from "../../parts/common.js";

const changes = (edit) => Object.entries(edit.changes).map(([name, [before, after]]) => `${name}: ${JSON.stringify(before)} → ${JSON.stringify(after)}`);
const COLUMNS = [["Setting", ([path]) => html`<code>${path}</code>`, { head: true }], ["Value", ([, value]) => html`<code class="text">${JSON.stringify(value)}</code>`]];

export const Settings = ({ view }) => html`<h2 class="hidden">Settings</h2>
  ${view.recipe ? html`<${Table} caption="The recipe, its preset filled in" columns=${COLUMNS} rows=${flatten(view.recipe)} keyOf=${([path]) => path} />`
    : html`<p class="note">${view.problem}</p>`}
  ${Object.keys(view.files ?? {}).length > 0 && html`<h2>Files beside the recipe</h2><${Table} caption="Files" rows=${Object.entries(view.files)} keyOf=${([name]) => name}
    columns=${[["File", ([name]) => name, { head: true }], ["SHA-256", ([, digest]) => html`<code>${digest}</code>`]]} />`}
  <h2>Edits in flight</h2>
  ${(view.recipe?.tuning?.mode ?? "off") !== "off" && html`<p>The tuning policy is in mode ${view.recipe.tuning.mode}: <a href=${link(["runs", view.id, "events"], { phase: "tuning" })}>its decisions</a>.</p>`}
  <${Table} caption="Edits in flight" rows=${[...(view.edits ?? [])].reverse()} keyOf=${(edit) => edit.at} empty="No setting was changed since the run was submitted."
    columns=${[["Time", (edit) => time(edit.at)], ["By", (edit) => edit.by, { head: true }], ["After step", (edit) => edit.step, { number: true }], ["Change", (edit) => html`${changes(edit).map((line) => html`<div><code>${line}</code></div>`)}`]]} />
  <h2>History</h2><${Table} caption="Changes of state" rows=${view.history} keyOf=${(change) => `${change.at} ${change.state}`}
    columns=${[["Time", (change) => time(change.at)], ["State", (change) => change.state, { head: true }], ["Reason", (change) => change.reason]]} />`;
