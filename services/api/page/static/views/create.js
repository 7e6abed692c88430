// Owns the form of a new run, from the recipe's JSON schema. Must not validate by rules of its own: the API does.
import { html, useEffect, useMemo, useState } from "../vendor/vendor.js";
import { call, get, runPath } from "../app/api.js";
import { valueAt, withValue } from "../app/documents.js";
import { useLoaded } from "../app/live.js";
import { go } from "../app/router.js";
import { Loaded } from "../parts/common.js";
import { Fields, resolved } from "../parts/fields.js";
import { say } from "../parts/toasts.js";

const CHECK_MS = 500;

export function Create({ params, me }) {
  const schema = useLoaded((signal) => get("/v1/recipes/schema", {}, { signal }), []);
  const start = useLoaded(async (signal) => {
    if (params.from) return { document: (await get(runPath(params.from), {}, { signal })).recipe, examples: [] };
    const { examples } = await get("/v1/recipes/examples", {}, { signal });
    return { document: examples[0]?.recipe ?? {}, examples };
  }, [params.from ?? ""]);
  return html`<h1>New run</h1><${Loaded} of=${schema} what="the recipe's schema">${(rules) => html`
    <${Loaded} of=${start} what="the first values">${({ document, examples }) => html`<${Form} rules=${rules} first=${document} examples=${examples} me=${me} />`}<//>`}<//>`;
}

function Form({ rules, first, examples, me }) {
  const [document, setDocument] = useState(first);
  const [asText, setAsText] = useState(false);
  const [text, setText] = useState("");
  const [faults, setFaults] = useState({ all: [], by: {} });
  const [id, setId] = useState("");
  const projects = Object.keys(me.roles).filter((project) => project !== "*" && me.roles[project] !== "viewer");
  const [project, setProject] = useState(projects[0] ?? "default");
  const [busy, setBusy] = useState(false);
  const sections = useMemo(() => Object.entries(resolved(rules, rules).properties ?? {}), [rules]);
  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(() => check(document, abort.signal).then(setFaults, () => {}), CHECK_MS);
    return () => { clearTimeout(timer); abort.abort(); };
  }, [document]);
  const set = (path, value) => setDocument((before) => withValue(before, path, value));
  const typed = (value) => {
    setText(value);
    try { setDocument(JSON.parse(value)); } catch (error) { setFaults({ all: [`recipe: is not JSON (${error.message})`], by: {} }); }
  };
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const made = await call("POST", "/v1/runs", { body: { recipe: document, project, ...(id ? { id } : {}) }, headers: { "Idempotency-Key": crypto.randomUUID() } });
      for (const warning of made.warnings ?? []) say(warning);
      go(["runs", made.id]);
    } catch (error) {
      setFaults(sorted(error.message));
      say(error.message, "bad");
    } finally {
      setBusy(false);
    }
  };
  return html`<form onSubmit=${submit} novalidate>
    <div class="row">
      ${examples.length > 1 && html`<label>Start from <select onChange=${(event) => setDocument(examples[event.target.value].recipe)}>${examples.map(({ name }, at) => html`<option value=${at}>${name}</option>`)}</select></label>`}
      <label>Run id (optional) <input value=${id} onInput=${(event) => setId(event.target.value)} placeholder="made from the name" /></label>
      <label>Project <input value=${project} onInput=${(event) => setProject(event.target.value)} list="projects" /></label>
      <datalist id="projects">${projects.map((name) => html`<option value=${name} />`)}</datalist>
      <label class="row"><input type="checkbox" checked=${asText} onChange=${(event) => { setText(JSON.stringify(document, null, 2)); setAsText(event.target.checked); }} /> as JSON</label>
    </div>
    <div role="alert">${faults.all.length > 0 && html`<div class="problem"><strong>${faults.all.length === 1 ? "One value is" : `${faults.all.length} values are`} not valid</strong><ul>${faults.all.map((line) => html`<li>${line}</li>`)}</ul></div>`}</div>
    ${asText ? html`<label>Recipe <textarea rows="30" spellcheck=${false} value=${text} onInput=${(event) => typed(event.target.value)} /></label>`
      : html`<${Fields} rules=${rules} entries=${sections} path=${[]} document=${document} set=${set} faults=${faults.by} value=${valueAt} />`}
    <p class="row"><button class="main" type="submit" disabled=${busy || faults.all.length > 0}>Start the run</button></p>
  </form>`;
}

async function check(document, signal) {
  const { faults } = await call("POST", "/v1/recipes/check", { body: { recipe: document }, signal });
  return sorted(faults.join("\n"));
}

/** Faults by the field that each line names first. */
function sorted(text) {
  const all = text.split("\n").filter(Boolean);
  return { all, by: Object.fromEntries(all.map((line) => [line.slice(0, line.indexOf(":")), line])) };
}
