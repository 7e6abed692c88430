// Owns the form that changes settings of a run in flight. Must not know which may change: the API's schema says so.
import { html, useState } from "../vendor/vendor.js";
import { call, get, getTagged, runPath } from "../app/api.js";
import { valueAt } from "../app/documents.js";
import { useLoaded } from "../app/live.js";
import { Dialog, Loaded } from "./common.js";
import { Fields, resolved } from "./fields.js";
import { say } from "./toasts.js";

const CHANGED = 412;
const OF_RUN = { "rollout.replicas": "rollout_replicas", priority: "priority" };
const QUEUED_ONLY = "priority";

/** `only`: the settings to show; all that may change by default. `done()` follows an edit that was accepted. */
export function EditSettings({ run, only, close, done }) {
  const rules = useLoaded(async (signal) => ({ $defs: (await get("/openapi.json", {}, { signal })).components.schemas }), []);
  const start = useLoaded((signal) => getTagged(runPath(run), { signal }), [run]);
  return html`<${Dialog} title=${`Edit ${run}`} close=${close}><${Loaded} of=${rules} what="the settings">${(schema) => html`
    <${Loaded} of=${start} what="the run">${(found) => html`<${Form} run=${run} rules=${schema} first=${found} only=${only} close=${close} done=${done} />`}<//>`}<//>
    <//>`;
}

const valuesOf = (view, names) => Object.fromEntries(names.map((name) =>
  [name, name in OF_RUN ? view[OF_RUN[name]] : valueAt(view.recipe ?? {}, name.split("."))]));

function Form({ run, rules, first, only, close, done }) {
  const entries = Object.entries(rules.$defs.EditRequest.properties)
    .filter(([name]) => (only ? only.includes(name) : name !== QUEUED_ONLY || first.value.state === "queued"));
  const names = entries.map(([name]) => name);
  const [base, setBase] = useState({ tag: first.tag, values: valuesOf(first.value, names) });
  const [typed, setTyped] = useState({});
  const [faults, setFaults] = useState({});
  const [note, setNote] = useState("");
  const [busy, setBusy] = useState(false);
  const changes = changed(entries, rules, base.values, typed);
  const again = async () => {
    const { value, tag } = await getTagged(runPath(run));
    const now = valuesOf(value, names);
    const moved = names.filter((name) => now[name] !== base.values[name]).map((name) => `${name} is ${JSON.stringify(now[name])} now`);
    setBase({ tag, values: now });
    setNote(`This run was changed since you opened the form${moved.length ? `: ${moved.join(", ")}` : ""}. What you typed is kept. Look at it, and save again.`);
  };
  const save = async (event) => {
    event.preventDefault();
    setBusy(true);
    setFaults({});
    try {
      const view = await call("PATCH", runPath(run), { body: changes, headers: { "If-Match": base.tag } });
      say("Edit: accepted");
      for (const warning of view.warnings ?? []) say(warning);
      close();
      done();
    } catch (error) {
      if (error.status === CHANGED) await again().catch((other) => setNote(other.message));
      else { setFaults(byField(error, names)); setNote(error.message); }
    } finally {
      setBusy(false);
    }
  };
  return html`<form onSubmit=${save} novalidate>
    <p>The run continues; each change is in its history, with your name.</p>
    <div role="alert">${note && html`<p class="note">${note}</p>`}</div>
    <div class="row"><${Fields} rules=${rules} entries=${entries} path=${[]} document=${{ ...base.values, ...typed }} set=${([name], value) => setTyped((before) => ({ ...before, [name]: value }))} faults=${faults} value=${valueAt} /></div>
    <p class="row"><button class="main" type="submit" disabled=${busy || Object.keys(changes).length === 0}>Save ${Object.keys(changes).length || ""}</button>
      <button type="button" onClick=${close}>Close</button></p></form>`;
}

/** By name the values that differ from those in force. An emptied field is null where the setting may be, else as it was. */
function changed(entries, rules, values, typed) {
  const given = entries.filter(([name]) => name in typed).map(([name, schema]) => [name, typed[name] ?? (resolved(schema, rules).optional ? null : values[name])]);
  return Object.fromEntries(given.filter(([name, value]) => value !== (values[name] ?? null)));
}

function byField(error, names) {
  const lines = error.message.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line]);
  const told = (error.faults ?? []).map((fault) => [fault.field ?? "", `${fault.field}: ${fault.detail ?? `expected ${fault.expected}`}`]);
  return Object.fromEntries([...lines, ...told].filter(([name]) => names.includes(name)));
}
