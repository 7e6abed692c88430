// Owns the logs of a run's processes. Must not colour or interpret them.
import { html, useEffect, useRef } from "../../vendor/vendor.js";
import { get, runPath } from "../../app/api.js";
import { clock } from "../../app/format.js";
import { useLoaded } from "../../app/live.js";
import { setParams } from "../../app/router.js";
import { Empty, Loaded } from "../../parts/common.js";

const LOOK_MS = 2000;
const MOST_LINES = 2000;

export function Logs({ view, params }) {
  const list = useLoaded((signal) => get(runPath(view.id, "/logs"), {}, { signal }), [view.id], 5000);
  return html`<h2 class="hidden">Logs</h2><${Loaded} of=${list} what="the processes">${({ processes }) => {
    if (!processes.length) return html`<${Empty}>No process has logged anything.<//>`;
    const chosen = processes.some(({ process }) => process === params.process) ? params.process : processes.at(-1).process;
    return html`<label>Process <select value=${chosen} onChange=${(event) => setParams({ process: event.target.value })}>
      ${processes.map(({ process }) => html`<option value=${process}>${process}</option>`)}</select></label>
      <${Lines} key=${chosen} run=${view.id} process=${chosen} />`;
  }}<//>`;
}

function Lines({ run, process }) {
  const kept = useRef([]), after = useRef(undefined), box = useRef(null);
  const log = useLoaded(async (signal) => {
    const found = await get(runPath(run, `/logs/${encodeURIComponent(process)}`), { after: after.current }, { signal });
    after.current = found.next;
    kept.current = [...kept.current, ...found.lines].slice(-MOST_LINES);
    return kept.current;
  }, [run, process], LOOK_MS);
  useEffect(() => { const place = box.current; if (place && place.scrollHeight - place.scrollTop - place.clientHeight < 200) place.scrollTop = place.scrollHeight; }, [log.value]);
  return html`<${Loaded} of=${log} what="the log">${(lines) => html`<div class="scroll card lines" tabindex="0" role="log" aria-label=${`Log of ${process}`} ref=${box}>
    <pre>${lines.map((line) => `${clock(line.at)}  ${line.text}\n`).join("")}</pre></div>`}<//>`;
}
