// Owns the comparison of runs: what differs in their settings, and their curves side by side.
import { html, useMemo } from "../vendor/vendor.js";
import { get, runPath } from "../app/api.js";
import { number } from "../app/format.js";
import { useLoaded } from "../app/live.js";
import { setParams } from "../app/router.js";
import { Lines } from "../parts/chart.js";
import { Empty, Loaded, Table } from "../parts/common.js";

const CURVES = [["accuracy", "Accuracy"], ["reward", "Reward"], ["entropy", "Entropy"], ["mean_token_probability", "Mean token probability"], ["response_length", "Response length"],
  ["clip_high_share", "Clipped at the upper bound"], ["staleness_mean", "Staleness"], ["tokens_per_second", "Tokens/s"]];

export function Compare({ params }) {
  const names = (params.runs ?? "").split(",").map((name) => name.trim()).filter(Boolean);
  const submit = (event) => { event.preventDefault(); setParams({ runs: new FormData(event.target).get("runs") }); };
  return html`<h1>Compare runs</h1>
    <form class="row" onSubmit=${submit}><label>Runs, with commas between them <input name="runs" size="60" value=${names.join(", ")} /></label><button class="main" type="submit">Compare</button></form>
    ${names.length < 2 ? html`<${Empty}>Name at least two runs, or choose them in the list.<//>` : html`<${Side} names=${names} />`}`;
}

function Side({ names }) {
  const settings = useLoaded((signal) => get("/v1/compare", { runs: names.join(",") }, { signal }), [names.join()]);
  const steps = useLoaded((signal) => Promise.all(names.map(async (name) => (await get(runPath(name, "/metrics"), {}, { signal })).steps)), [names.join()], 5000);
  const columns = [["Setting", ({ path }) => html`<code>${path}</code>`, { head: true }],
    ...names.map((name) => [name, ({ values }) => html`<code class="text">${JSON.stringify(values[name])}</code>`])];
  return html`<h2>Curves</h2><${Loaded} of=${steps} what="the curves">${(found) => html`<${Curves} names=${names} runs=${found} />`}<//>
    <h2>Settings that differ</h2><${Loaded} of=${settings} what="the settings">${(found) =>
      html`<${Table} caption="Settings that differ" columns=${columns} rows=${found.settings} keyOf=${({ path }) => path} empty="No setting differs." />`}<//>`;
}

function Curves({ names, runs }) {
  const aligned = useMemo(() => {
    const x = [...new Set(runs.flat().map(({ step }) => step))].sort((a, b) => a - b);
    const at = runs.map((steps) => new Map(steps.map(({ step, metrics }) => [step, metrics])));
    return { x, charts: CURVES.map(([name, title]) => [title, names.map((label, which) => ({ label, values: x.map((step) => at[which].get(step)?.[name] ?? null) }))]) };
  }, [runs]);
  if (!aligned.x.length) return html`<${Empty}>None of them has trained a step.<//>`;
  const last = (values) => number(values.filter((value) => value !== null).at(-1));
  return html`<div class="charts">${aligned.charts.map(([title, series]) => html`<${Lines} key=${title} title=${title} x=${aligned.x} series=${series} />`)}</div>
    <h2>Last values</h2><${Table} caption="Last values" rows=${aligned.charts} keyOf=${([title]) => title}
      columns=${[["Metric", ([title]) => title, { head: true }], ...names.map((name, which) => [name, ([, series]) => last(series[which].values), { number: true }])]} />`;
}
