// Owns the list of runs: filters, pages, and what can be done with several. Must not show one run.
import { html, useEffect, useState } from "../vendor/vendor.js";
import { get } from "../app/api.js";
import { ago, time } from "../app/format.js";
import { useLoaded } from "../app/live.js";
import { go, link, setParams } from "../app/router.js";
import { Loaded, State, Table } from "../parts/common.js";

const STATES = ["queued", "starting", "running", "paused", "succeeded", "failed", "cancelled"];
const PAGE = 50;
const LOOK_MS = 3000;

export function Runs({ params, me }) {
  const { state = "", project = "", name = "", after = "" } = params;
  const list = useLoaded((signal) => get("/v1/runs", { state, project, name, after, limit: PAGE }, { signal }), [state, project, name, after], LOOK_MS);
  const [chosen, setChosen] = useState([]);
  useEffect(() => setChosen([]), [state, project, name]);
  const choose = (id, on) => setChosen((before) => (on ? [...before, id] : before.filter((other) => other !== id)));
  const columns = [
    ["", (run) => html`<input type="checkbox" aria-label=${`choose ${run.id}`} checked=${chosen.includes(run.id)} onChange=${(event) => choose(run.id, event.target.checked)} />`],
    ["Run", (run) => html`<a href=${link(["runs", run.id])}>${run.id}</a>`, { head: true }],
    ["State", (run) => html`<${State} state=${run.state} note=${run.cancel_requested && !["cancelled", "failed", "succeeded"].includes(run.state) ? "cancel requested" : run.closing ?? ""} />`],
    ["Project", (run) => run.project],
    ["Submitted", (run) => html`<time title=${time(run.created_at)}>${ago(run.created_at)}</time>`],
    ["Reason", (run) => html`<span class="clip">${run.problem || run.reason}</span>`],
  ];
  const filter = (name_) => (event) => setParams({ [name_]: event.target.value, after: "" });
  return html`
    <div class="row spread"><h1>Runs</h1>
      <div class="row">
        ${chosen.length > 1 && html`<button type="button" onClick=${() => go(["compare"], { runs: chosen.join(",") })}>Compare ${chosen.length}</button>`}
        ${Object.values(me.roles).some((role) => role !== "viewer") && html`<a class="button main" href=${link(["create"])}>New run</a>`}
      </div></div>
    <form class="row" role="search" onSubmit=${(event) => event.preventDefault()}>
      <label>State <select value=${state} onChange=${filter("state")}><option value="">all</option>${STATES.map((word) => html`<option>${word}</option>`)}</select></label>
      <label>Name contains <input type="search" value=${name} onInput=${filter("name")} /></label>
      <label>Project <input type="search" value=${project} onInput=${filter("project")} /></label>
    </form>
    <h2 class="hidden">List</h2>
    <${Loaded} of=${list} what="runs">${({ runs, next }) => html`
      <${Table} caption="Runs, newest first" columns=${columns} rows=${runs} keyOf=${(run) => run.id} empty="No run matches. The command penstock demo trains one within minutes." />
      <p class="row">${after && html`<button type="button" onClick=${() => setParams({ after: "" })}>Newest</button>`}
        ${next && html`<button type="button" onClick=${() => setParams({ after: next })}>Older</button>`}</p>`}<//>`;
}
