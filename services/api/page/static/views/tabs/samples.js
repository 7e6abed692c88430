// Owns the search of a run's samples. Must not draw one group's story.
import { html, useState } from "../../vendor/vendor.js";
import { get, runPath } from "../../app/api.js";
import { number, signed } from "../../app/format.js";
import { useLoaded } from "../../app/live.js";
import { link, setParams } from "../../app/router.js";
import { Loaded, Table } from "../../parts/common.js";

const FILTERS = ["text", "outcome", "release", "step", "version", "prompt", "lane"];
const CHOICES = { outcome: ["correct", "wrong", "unknown"], release: ["trained", "filtered", "stale", "dead", "evaluated"], lane: ["train", "evaluation"] };
const MOST_TEXT = 160;

export function Samples({ view, params }) {
  const given = Object.fromEntries(FILTERS.map((name) => [name, params[name] ?? ""]));
  const after = params.after ?? "";
  const [typed, setTyped] = useState(given);
  const found = useLoaded((signal) => get(runPath(view.id, "/samples"), { ...given, after, limit: 50 }, { signal }), [view.id, JSON.stringify(given), after]);
  const submit = (event) => { event.preventDefault(); setParams({ ...typed, after: "" }); };
  const field = (name, title, type = "search") => html`<label>${title}
    ${CHOICES[name] ? html`<select value=${typed[name]} onChange=${(event) => setTyped({ ...typed, [name]: event.target.value })}><option value="">all</option>${CHOICES[name].map((word) => html`<option>${word}</option>`)}</select>`
      : html`<input type=${type} min="0" value=${typed[name]} onInput=${(event) => setTyped({ ...typed, [name]: event.target.value })} />`}</label>`;
  const columns = [
    ["Group", (sample) => html`<a href=${link(["runs", view.id, "groups", sample.group], { sample: sample.index })}>${sample.group}·${sample.index}</a>`, { head: true }],
    ["Verdict", (sample) => html`<span class=${sample.outcome ?? ""}>${sample.outcome ?? "–"}</span>`],
    ["Score", (sample) => number(sample.score), { number: true }], ["Advantage", (sample) => signed(sample.advantage), { number: true }],
    ["Fate", (sample) => sample.release], ["Step", (sample) => number(sample.step), { number: true }],
    ["Version", (sample) => (sample.versions?.length ? sample.versions.join(", ") : "–"), { number: true }], ["Tokens", (sample) => number(sample.response_tokens), { number: true }],
    ["Prompt", (sample) => sample.prompt_id ?? "–"], ["Response", (sample) => html`<span class="clip">${cut(sample.text)}</span>`],
  ];
  return html`<h2 class="hidden">Samples</h2>
    <form class="row" role="search" onSubmit=${submit}>
      ${field("text", "Text contains")}${field("outcome", "Verdict")}${field("release", "Fate")}${field("step", "Step", "number")}${field("version", "Version", "number")}${field("prompt", "Prompt id")}${field("lane", "Lane")}
      <button class="main" type="submit">Search</button></form>
    <${Loaded} of=${found} what="samples">${({ samples, next, problems }) => html`
      ${problems.map((problem) => html`<p class="note">${problem}</p>`)}
      <${Table} caption="Samples" columns=${columns} rows=${samples} keyOf=${(sample) => `${sample.lane} ${sample.group} ${sample.resumption} ${sample.index}`} empty=${next ? "Nothing in this part of the archive; there is more." : "No sample of an ended group matches."} />
      <p class="row">${after && html`<button type="button" onClick=${() => setParams({ after: "" })}>First</button>`}
      ${next && html`<button type="button" onClick=${() => setParams({ after: next })}>More</button>`}</p>`}<//>`;
}

const cut = (text) => (text && text.length > MOST_TEXT ? `${text.slice(0, MOST_TEXT)}…` : text ?? "–");
