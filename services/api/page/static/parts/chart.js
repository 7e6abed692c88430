// Owns line charts, stacked bands and heat maps. Must not fetch anything.
import { html, uPlot, useEffect, useRef, useState } from "../vendor/vendor.js";
import { number } from "../app/format.js";

const COLORS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
const HEIGHT = 170;
const MOST_COLUMNS = 200;
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colorOf = (at) => css(COLORS[at % COLORS.length]);
const last = (values) => { for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at]; return null; };

/** Counts up when the colour scheme changes, so that charts are drawn in its colours. */
function useScheme() {
  const [round, setRound] = useState(0);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setRound((before) => before + 1);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return round;
}

/** Mounts a uPlot that follows the width of its place. `make(width)` returns [options, data]. */
function usePlot(make, keys, data) {
  const place = useRef(null), plot = useRef(null), scheme = useScheme();
  useEffect(() => {
    const [options, first] = make(place.current.clientWidth || 300);
    plot.current = new uPlot(options, first, place.current);
    const box = place.current;
    const watch = new ResizeObserver(() => plot.current.setSize({ width: box.clientWidth || 300, height: HEIGHT }));
    watch.observe(box);
    return () => { watch.disconnect(); plot.current.destroy(); };
  }, [...keys, scheme]);
  useEffect(() => { plot.current?.setData(data); }, [data]);
  return place;
}

const short = (value) => (value === null ? "" : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(0) : number(value));

const axes = () => {
  const stroke = css("--muted"), grid = { stroke: css("--grid"), width: 1 };
  const both = { stroke, grid, ticks: grid, font: "11px system-ui" };
  return [{ ...both, size: 28, incrs: WHOLE_STEPS, values: (_, steps) => steps.map(number) }, { ...both, size: 52, values: (_, values) => values.map(short) }];
};

/** While nothing is pointed at, the legend has the last values. */
const showLast = (plot) => { if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: plot.data[0].length - 1 }, false); };
const hooks = { ready: [showLast], setCursor: [showLast], setData: [showLast] };

/** Curves over rollout steps. `series`: {label, values, dash, points}; null where a step has no value. */
export function Lines({ title, unit = "", x, series, help }) {
  const data = [x, ...series.map(({ values }) => values)];
  const make = (width) => [{
    width, height: HEIGHT, cursor: { sync: { key: "steps" }, points: { size: 6 } }, hooks,
    scales: { x: { time: false } }, axes: axes(),
    series: [{ label: "step" }, ...series.map(({ label, dash, points }, at) => ({
      label, stroke: colorOf(at), width: 2, dash: dash ? [6, 4] : undefined, spanGaps: true,
      points: { show: points || x.length < 2, size: 7 }, value: (_, value) => number(value) }))],
  }, data];
  const place = usePlot(make, [series.map(({ label }) => label).join("|"), x.length < 2], data);
  const summary = series.map(({ label, values }) => `${label} ${number(last(values))}`).join(", ");
  return html`<figure class="chart"><figcaption title=${help}>${title}${unit && html` <small>${unit}</small>`}
      <span class="latest">${series.length === 1 ? number(last(series[0].values)) : ""}</span></figcaption>
    <div ref=${place} role="img" aria-label=${`${title} over ${x.length} rollout steps; last: ${summary}`}></div></figure>`;
}

/** A stacked band over rollout steps. `series`: {label, values}, the lowest first. */
export function Bands({ title, unit = "", x, series }) {
  const sums = series.map(() => x.map(() => 0));
  x.forEach((_, step) => { let sum = 0; series.forEach(({ values }, at) => { sum += values[step] ?? 0; sums[at][step] = sum; }); });
  const data = [x, ...[...sums].reverse()];
  const names = [...series].reverse();
  const color = (at) => colorOf(series.length - 1 - at);
  const make = (width) => [{
    width, height: HEIGHT, cursor: { sync: { key: "steps" }, points: { show: false } }, scales: { x: { time: false }, y: { range: (_, low, high) => [0, high || 1] } }, axes: axes(), hooks,
    series: [{ label: "step" }, ...names.map(({ label }, at) => ({
      label, stroke: color(at), fill: `${color(at)}99`, width: 1, points: { show: x.length < 2 },
      value: (plot, _, which, step) => number(step === null || step === undefined ? null : names[which - 1]?.values?.[step]) }))],
    bands: names.slice(0, -1).map((_, at) => ({ series: [at + 1, at + 2], fill: `${color(at)}99` })),
  }, data];
  const place = usePlot(make, [series.map(({ label }) => label).join("|"), x.length], data);
  const summary = series.map(({ label, values }) => `${label} ${number(last(values))}`).join(", ");
  return html`<figure class="chart"><figcaption>${title}${unit && html` <small>${unit}</small>`}</figcaption>
    <div ref=${place} role="img" aria-label=${`${title} over ${x.length} rollout steps; last: ${summary}`}></div></figure>`;
}

/** How many groups had n of G correct responses, over rollout steps. `counts[step][n]`. */
export function Heat({ title, x, counts, size }) {
  const from = Math.max(0, x.length - MOST_COLUMNS), shown = counts.slice(from);
  const shares = shown.map((row) => { const all = row.reduce((sum, value) => sum + value, 0) || 1; return row.map((value) => value / all); });
  const width = Math.max(1, shown.length);
  return html`<figure class="chart"><figcaption>${title} <small>share of groups, by correct responses of ${size}</small></figcaption>
    <div class="heat"><div class="rows" aria-hidden="true"><span>${size}</span><span>0</span></div>
      <svg viewBox=${`0 0 ${width} ${size + 1}`} preserveAspectRatio="none" role="img" aria-label=${`${title}: last step ${shown.at(-1)?.map((value, n) => `${value} groups with ${n} correct`).join(", ") ?? "none"}`}>
        ${shares.map((row, column) => row.map((share, n) => share > 0 && html`<rect x=${column} y=${size - n} width="1.02" height="0.96"
          class="cell" fill-opacity=${0.12 + 0.88 * Math.sqrt(share)}><title>step ${x[from + column]}: ${shown[column][n]} groups with ${n} of ${size} correct</title></rect>`))}
      </svg></div>
    <div class="steps" aria-hidden="true"><span>step ${x[from] ?? ""}</span><span>${x.at(-1) ?? ""}</span></div></figure>`;
}
