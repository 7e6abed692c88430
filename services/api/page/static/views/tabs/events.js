// Owns the story of a run: its events, changes of state, rollout steps and evaluations, the last ones first, filtered.
import { html, useRef } from "../../vendor/vendor.js";
import { get, runPath } from "../../app/api.js";
import { number, time } from "../../app/format.js";
import { useLoaded } from "../../app/live.js";
import { setParams } from "../../app/router.js";
import { Empty, Loaded } from "../../parts/common.js";

const LOOK_MS = 3000, PAGES_AT_ONCE = 20, MOST_KEPT = 5000, MOST_SHOWN = 500;

export function Events({ view, params }) {
  const kept = useRef([]), after = useRef(undefined);
  const story = useLoaded(async (signal) => {
    for (let page = 0, more = true; more && page < PAGES_AT_ONCE; page += 1) {
      const found = await get(runPath(view.id, "/events"), { after: after.current, limit: 500 }, { signal });
      after.current = found.next;
      more = found.more;
      kept.current = [...kept.current, ...found.events.map(told)].slice(-MOST_KEPT);
    }
    return kept.current;
  }, [view.id], LOOK_MS);
  const { phase = "", text = "" } = params;
  const filter = (name) => (event) => setParams({ [name]: event.target.value });
  return html`<h2 class="hidden">Events</h2><${Loaded} of=${story} what="the events">${(all) => {
    const phases = [...new Set(all.map((line) => line.phase))].sort();
    const found = all.filter((line) => (!phase || line.phase === phase) && (!text || line.text.toLowerCase().includes(text.toLowerCase())));
    return html`<form class="row" role="search" onSubmit=${(event) => event.preventDefault()}>
        <label>What <select value=${phase} onChange=${filter("phase")}><option value="">all</option>${[...new Set([...phases, ...(phase ? [phase] : [])])].map((name) => html`<option>${name}</option>`)}</select></label>
        <label>Text contains <input type="search" value=${text} onInput=${filter("text")} /></label></form>
      ${found.length === 0 ? html`<${Empty}>${all.length ? "Nothing matches." : "Nothing has happened yet."}<//>` : html`<ol class="log" reversed>
        ${found.slice(-MOST_SHOWN).reverse().map((line) => html`<li key=${line.id}><time>${time(line.at)}</time><strong>${line.phase}</strong><span>${line.service}</span><span class="text">${line.text}</span></li>`)}</ol>
      ${found.length > MOST_SHOWN && html`<p class="empty">The last ${MOST_SHOWN} of ${number(found.length)}.</p>`}`}`;
  }}<//>`;
}

const METRICS = ["accuracy", "reward", "entropy"];
const LINES = {
  event: ({ service, phase, text }) => ({ service, phase, text }),
  state: ({ state, reason }) => ({ service: "", phase: `run is ${state}`, text: reason }),
  step: ({ step, metrics }) => ({ service: "learner", phase: "rollout step", text: `${step}: ${METRICS.filter((name) => name in metrics).map((name) => `${name} ${number(metrics[name])}`).join(", ")}` }),
  evaluation: ({ set, name, accuracy }) => ({ service: "sampler", phase: "evaluation", text: `${set} ${name}: avg@k ${number(accuracy)}` }),
};
const told = ({ id, at, kind, data }) => ({ id, at, ...(LINES[kind]?.(data) ?? { service: "", phase: kind, text: JSON.stringify(data) }) });
