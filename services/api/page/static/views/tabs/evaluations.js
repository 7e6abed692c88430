// Owns the table of a run's evaluations. Must not fetch anything.
import { html } from "../../vendor/vendor.js";
import { number, percent } from "../../app/format.js";
import { Table } from "../../parts/common.js";

const score = (value, error) => (value === null || value === undefined ? "–" : `${value.toFixed(3)} ± ${(error ?? 0).toFixed(3)}`);
const COLUMNS = [
  ["Set", (record) => record.set, { head: true }], ["Evaluation", (record) => record.name],
  ["Version", (record) => (record.newest_version && record.newest_version !== record.version ? `${record.version}–${record.newest_version}` : record.version), { number: true }],
  ["Prompts", (record) => number(record.prompts), { number: true }],
  ["avg@k", (record) => `${score(record.accuracy, record.standard_error)} (k ${record.samples_per_prompt})`, { number: true }],
  ["pass@k", (record) => { const best = record.pass_at.at(-1); return best && best.k > 1 ? `${score(best.value, best.standard_error)} (k ${best.k})` : "–"; }, { number: true }],
  ["maj@k", (record) => score(record.majority, record.majority_standard_error), { number: true }],
  ["Length", (record) => number(record.response_length), { number: true }], ["Truncated", (record) => percent(record.truncated_share), { number: true }],
  ["Unknown", (record) => number(record.unknown), { number: true }],
];

export const Evaluations = ({ view }) => html`<h2 class="hidden">Evaluations</h2><${Table} caption="Evaluations of held-out sets" columns=${COLUMNS} rows=${view.evaluations}
  keyOf=${(record) => `${record.set} ${record.name}`} empty="No evaluation has finished yet." />`;
