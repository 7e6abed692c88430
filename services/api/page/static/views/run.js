// Owns the frame of one run: what it is, what may be done with it, its tabs. Must not draw the content of a tab.
import { html, useMemo, useState } from "../vendor/vendor.js";
import { get, runPath } from "../app/api.js";
import { ago, time } from "../app/format.js";
import { useLoaded, useRunEvents } from "../app/live.js";
import { link } from "../app/router.js";
import { Facts, Loaded, State, Tabs } from "../parts/common.js";
import { Actions } from "../parts/actions.js";
import { Evaluations } from "./tabs/evaluations.js";
import { Events } from "./tabs/events.js";
import { Files } from "./tabs/files.js";
import { Ledger } from "./tabs/ledger.js";
import { Logs } from "./tabs/logs.js";
import { Overview } from "./tabs/overview.js";
import { Samples } from "./tabs/samples.js";
import { Settings } from "./tabs/settings.js";

const TABS = {
  "": ["Overview", Overview], samples: ["Samples", Samples], evaluations: ["Evaluations", Evaluations], ledger: ["Ledger", Ledger], events: ["Events", Events],
  settings: ["Settings", Settings], logs: ["Logs", Logs], files: ["Files", Files],
};
const LOOK_MS = 5000;
const ENDED = ["succeeded", "failed", "cancelled"];

export function Run({ parts, params, me }) {
  const [, id, tab = ""] = parts;
  const [offline, setOffline] = useState("");
  const run = useLoaded((signal) => get(runPath(id), {}, { signal }), [id], LOOK_MS);
  const steps = useSteps(id);
  const problem = useRunEvents(id, () => { run.again(); steps.again(); });
  if (problem !== offline) setOffline(problem);
  const [, View] = TABS[tab] ?? TABS[""];
  const tabs = Object.entries(TABS).map(([name, [title]]) => [name, title, link(["runs", id, ...(name ? [name] : [])])]);
  return html`<${Loaded} of=${run} what=${`run ${id}`}>${(view) => html`
    <div class="row spread">
      <div><h1>${view.id}</h1><${State} state=${view.state} note=${note(view)} /></div>
      <${Actions} view=${view} me=${me} done=${run.again} />
    </div>
    <${Facts} facts=${[["Project", view.project], ["Reason", view.reason], ["Submitted", html`<time title=${time(view.created_at)}>${ago(view.created_at)}</time>`],
      ["Rollout step", view.rollout_steps_total ? `${view.rollout_steps} of ${view.rollout_steps_total}` : null], ["Policy version", view.policy_version],
      ["Priority", view.priority || null], ["Place in the queue", view.queue_position], ["Waits for", view.queue_position ? view.waits_for : null]]} />
    ${view.problem && html`<p class="note">${view.problem}</p>`}
    ${(view.alerts ?? []).map((alert) => html`<p class="note" role="alert">${alert}</p>`)}
    <${Tabs} label="About this run" tabs=${tabs} current=${TABS[tab] ? tab : ""} />
    <${View} key=${view.id} view=${view} steps=${steps.value ?? []} params=${params} me=${me} again=${run.again} />
    ${offline && html`<p class="empty" role="status">Live events: ${offline} (the page looks again every ${LOOK_MS / 1000} s)</p>`}`}<//>`;
}

const note = (view) => (view.cancel_requested && !ENDED.includes(view.state) ? "cancel requested"
  : view.pause_requested && view.state === "running" ? "pause requested" : view.closing ?? "");

/** All rollout steps so far; each look reads only what is new, unless the run was rewound. */
function useSteps(id) {
  const kept = useMemo(() => ({ steps: [] }), [id]);
  return useLoaded(async (signal) => {
    const after = kept.steps.at(-1)?.id ?? "0-0";
    const { steps } = await get(runPath(id, "/metrics"), { after }, { signal });
    if (steps.length) {
      const first = steps[0].step;
      kept.steps = [...kept.steps.filter((step) => step.step < first), ...steps];
    }
    return kept.steps;
  }, [id], LOOK_MS);
}
