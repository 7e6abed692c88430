// Owns the overview of a run: curves, what became of groups, services, the event log. Must not fetch anything.
import { html, useMemo } from "../../vendor/vendor.js";
import { clock, duration, number } from "../../app/format.js";
import { Bands, Heat, Lines } from "../../parts/chart.js";
import { Empty, Facts } from "../../parts/common.js";

// Title, unit, the step metrics with their labels, help.
const CURVES = [
  ["Reward", "", [["reward", "shaped"], ["score", "score"]], "Mean reward before filtering"],
  ["Entropy", "nats", [["entropy", "entropy"]], "Mean entropy of the policy per trained token"],
  ["Mean token probability", "", [["mean_token_probability", "probability"]], "Of the trained tokens"],
  ["Clip fractions", "share of tokens", [["clip_high_share", "upper"], ["clip_low_share", "lower"], ["dual_clip_share", "dual"]], "Trained tokens that were clipped"],
  ["Staleness", "rollout steps", [["staleness_mean", "mean"], ["staleness_max", "highest"]], "Of the trained samples"],
  ["Parity", "nats", [["logprob_difference_mean", "mean"], ["logprob_difference_p99", "p99"]], "Absolute difference between the log-probs of learner and engine"],
  ["Effective sample size", "ratio", [["effective_sample_size", "raw"], ["weight_effective_sample_size", "in force"]], "Of the importance weights"],
  ["Gradient norm", "", [["gradient_norm", "norm"]], "Before clipping"],
  ["Speed", "response tokens/s", [["tokens_per_second", "tokens/s"]], "From the first start to the last end"],
];
const BY_CORRECT = /^groups_with_(\d+)_of_(\d+)_correct$/;
const ENDED = ["succeeded", "failed", "cancelled"];
const SERVICES = ["controller", "sampler", "rollout", "verifier", "learner", "tracker"];

export function Overview({ view, steps }) {
  const x = useMemo(() => steps.map(({ step }) => step), [steps]);
  const of = (name) => steps.map(({ metrics }) => metrics[name] ?? null);
  const curves = useMemo(() => CURVES.map(([title, unit, metrics, help]) => ({ title, unit, help,
    series: metrics.map(([name, label]) => ({ label, values: of(name) })).filter(({ values }) => values.some((value) => value !== null)) }))
    .filter(({ series }) => series.length), [steps]);
  const rewards = useMemo(() => [...new Set(steps.flatMap(({ metrics }) => Object.keys(metrics).filter((name) => name.startsWith("reward_"))))].sort(), [steps]);
  const heat = useMemo(() => histogram(steps), [steps]);
  return html`
    ${(view.processes.length > 0 || !ENDED.includes(view.state)) && html`<h2>Services</h2><${ServiceMap} view=${view} />`}
    <h2>Groups</h2><${Facts} facts=${["dispatched", "trained", "filtered", "stale", "dead", "pending"].map((name) => [name, number(view.groups[name])])
      .concat([["reconciled", view.groups.reconciled ? "yes" : html`<strong class="wrong">no</strong>`]])} />
    <h2>Curves</h2>
    ${steps.length === 0 && html`<${Empty}>No rollout step has been trained yet.<//>`}
    ${steps.length > 0 && html`<div class="charts">
      <${Accuracy} x=${x} training=${of("accuracy")} evaluations=${view.evaluations} steps=${steps} />
      <${Length} x=${x} length=${of("response_length")} truncated=${of("truncated_share")} limit=${view.recipe?.rollout.max_new_tokens} />
      ${curves.map((curve) => html`<${Lines} key=${curve.title} x=${x} ...${curve} />`)}
      ${rewards.length > 0 && html`<${Lines} title="Named rewards" x=${x} series=${rewards.map((name) => ({ label: name.slice(7), values: of(name) }))} />`}
      <${Bands} title="Groups by what became of them" x=${x} series=${["kept", "filtered", "stale", "dead"].map((name) => ({ label: name, values: of(`groups_${name}`).map((value) => value ?? 0) }))} />
      ${heat && html`<${Heat} title="Group accuracy" x=${x} ...${heat} />`}
    </div>`}
    <h2>Events</h2><${Events} events=${view.events} />`;
}

/** Accuracy of the batches, and avg@k of each held-out set at the step of its policy version. */
function Accuracy({ x, training, evaluations, steps }) {
  const series = useMemo(() => {
    const byVersion = new Map(steps.map(({ version, step }) => [version, step]));
    const sets = [...new Set(evaluations.map(({ set }) => set))];
    return [{ label: "training", values: training }, ...sets.map((set) => {
      const at = new Map(evaluations.filter((record) => record.set === set).map((record) => [byVersion.get(record.version) ?? x[0], record.accuracy]));
      return { label: set, dash: true, points: true, values: x.map((step) => at.get(step) ?? null) };
    }).filter(({ values }) => values.some((value) => value !== null))];
  }, [steps, evaluations.length]);
  return html`<${Lines} title="Accuracy" x=${x} series=${series} help="Of the batch before filtering, and of held-out sets" />`;
}

function Length({ x, length, truncated, limit }) {
  const series = useMemo(() => [{ label: "mean", values: length }, ...(limit ? [{ label: "limit", dash: true, values: x.map(() => limit) }] : [])], [x, limit]);
  const cut = truncated.filter((value) => value !== null).at(-1);
  return html`<${Lines} title="Response length" unit=${`tokens; truncated ${cut === undefined ? "–" : `${(100 * cut).toFixed(1)} %`}`} x=${x} series=${series} />`;
}

/** By step: how many groups had n correct responses; null before the first step that says so. */
function histogram(steps) {
  const size = Math.max(-1, ...steps.flatMap(({ metrics }) => Object.keys(metrics).map((name) => Number(name.match(BY_CORRECT)?.[2] ?? -1))));
  if (size < 1) return null;
  return { size, counts: steps.map(({ metrics }) => Array.from({ length: size + 1 }, (_, n) => metrics[`groups_with_${n}_of_${size}_correct`] ?? 0)) };
}

/** Each service with its processes, and what they wait for. */
function ServiceMap({ view }) {
  const now = Date.now() / 1000;
  const found = Map.groupBy ? Map.groupBy(view.processes, ({ service }) => service) : group(view.processes);
  const names = [...SERVICES.filter((name) => found.has(name)), ...[...found.keys()].filter((name) => !SERVICES.includes(name))];
  if (!names.length) return html`<${Empty}>No process is alive.<//>`;
  return html`<div class="map">${names.map((name) => {
    const processes = found.get(name);
    const waits = processes.flatMap((process) => process.waits.map((wait) => ({ ...wait, process: process.id })));
    const stalled = waits.filter((wait) => now - wait.since > wait.deadline_s);
    const busy = waits.filter((wait) => !wait.idle && now - wait.since > 45);
    const ready = processes.filter(({ state }) => state === "ready").length;
    const health = stalled.length ? "stalled" : busy.length || ready < processes.length ? "waiting" : "ready";
    const shown = (stalled.length ? stalled : busy.length ? busy : waits).slice(0, 2);
    const versions = [...new Set(processes.map(({ version }) => version).filter((version) => version !== null))];
    return html`<section class=${`service ${health}`} key=${name}><h3>${name}</h3>
      <p>${ready} of ${processes.length} ready${versions.length ? `, version ${versions.join(", ")}` : ""}</p>
      ${shown.map((wait) => html`<p><strong class=${health === "ready" ? "" : health}>${health === "stalled" ? "stalled" : "waits"}</strong> ${duration(now - wait.since)} for ${wait.waits_for}</p>`)}
    </section>`;
  })}</div>`;
}

const group = (processes) => processes.reduce((found, process) => found.set(process.service, [...(found.get(process.service) ?? []), process]), new Map());

const Events = ({ events }) => (events.length === 0 ? html`<${Empty}>Nothing has happened yet.<//>` : html`<ol class="log" reversed>
  ${[...events].reverse().map((event) => html`<li key=${`${event.at} ${event.phase} ${event.text}`}><time>${clock(event.at)}</time><strong>${event.service}: ${event.phase}</strong><span class="text">${event.text}</span></li>`)}</ol>`);
