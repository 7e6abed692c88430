// Owns the ledger of a run: tokens, time and money by what they were used for. Must not compute a share of time: the API does.
import { html } from "../../vendor/vendor.js";
import { get, runPath } from "../../app/api.js";
import { hours, money, number, percent, time } from "../../app/format.js";
import { useLoaded } from "../../app/live.js";
import { Facts, Loaded, Table } from "../../parts/common.js";
import { Shares } from "../../parts/shares.js";

const LOOK_MS = 5000;

export function Ledger({ view }) {
  const found = useLoaded((signal) => get(runPath(view.id, "/ledger"), {}, { signal }), [view.id], LOOK_MS);
  return html`<h2 class="hidden">Ledger</h2><${Loaded} of=${found} what="the ledger">${(ledger) => html`<${Sheet} ledger=${ledger} />`}<//>`;
}

function Sheet({ ledger }) {
  const { rows, tokens, currency } = ledger;
  const device = ledger.gpu_seconds > 0 ? "GPU" : "CPU";
  const all = rows.reduce((sum, row) => sum + row.tokens, 0);
  const columns = [
    ["Use", ({ use }) => words(use), { head: true }], ["Tokens", (row) => number(row.tokens), { number: true }],
    ["Share of time", ({ share }) => percent(share), { number: true }], ["GPU hours", (row) => hours(row.gpu_seconds), { number: true }],
    ["CPU hours", (row) => hours(row.cpu_seconds), { number: true }], ["Cost", ({ cost }) => money(cost, currency), { number: true }],
  ];
  const sum = { use: "total", tokens: all, share: rows.some(({ share }) => share) ? 1 : null, gpu_seconds: ledger.gpu_seconds, cpu_seconds: ledger.cpu_seconds, cost: ledger.cost };
  return html`
    <p class=${ledger.closes ? "closes" : "note"} role="status">${ledger.closes
      ? html`<span aria-hidden="true">✓</span> It closes to the token: each of the ${number(tokens.generated)} generated tokens is in one row.`
      : `It does not close: ${number(tokens.generated)} tokens were generated, and the rows have ${number(all)}.`}</p>
    <${Facts} facts=${[["GPU hours", limited(hours(ledger.gpu_seconds), ledger.gpu_hours_limit)], ["CPU hours", hours(ledger.cpu_seconds)],
      ["Cost", ledger.cost === null ? "the platform has no prices" : limited(money(ledger.cost, currency), ledger.budget === null ? null : money(ledger.budget, currency))],
      ["Prices", ledger.prices && `${money(ledger.prices.gpu_hour, currency)} per GPU hour, ${money(ledger.prices.cpu_hour, currency)} per CPU hour`],
      ["Accounted since", ledger.since === null ? "not yet" : time(ledger.since)]]} />
    <${Shares} title=${`${device} time`} parts=${rows.map(({ use, share }) => [use, words(use), share])} />
    <${Shares} title="Tokens" parts=${rows.filter(({ use }) => use !== "idle").map((row) => [row.use, words(row.use), all ? row.tokens / all : 0])} />
    <${Table} caption="The ledger by use" columns=${columns} rows=${[...rows, sum]} keyOf=${({ use }) => use} />`;
}

const words = (use) => use.replaceAll("_", " ");
const limited = (used, most) => (most === null || most === undefined ? used : `${used} of ${most}`);
