// Owns the projects: what their active runs use of each quota, and what all their runs have used so far.
import { html } from "../vendor/vendor.js";
import { get } from "../app/api.js";
import { bytes, hours, money, number } from "../app/format.js";
import { useLoaded } from "../app/live.js";
import { link } from "../app/router.js";
import { Loaded, Table } from "../parts/common.js";
import { Shares } from "../parts/shares.js";

const LOOK_MS = 10000;
const of = (used, most, shown = number) => (most === null || most === undefined ? shown(used ?? 0) : `${shown(used ?? 0)} of ${shown(most)}`);

export function Projects() {
  const projects = useLoaded((signal) => get("/v1/projects", {}, { signal }), [], LOOK_MS);
  const ledgers = useLoaded((signal) => get("/v1/ledger", {}, { signal }), [], LOOK_MS);
  const quotas = [
    ["Project", ({ name }) => html`<a href=${link(["runs"], { project: name })}>${name}</a>`, { head: true }], ["Your role", ({ role }) => role],
    ["Active runs", ({ use, quota }) => of(use.runs, quota.runs), { number: true }], ["GPUs", ({ use, quota }) => of(use.gpus, quota.gpus), { number: true }],
    ["Redis memory", ({ use, quota }) => of(use.redis_memory, quota.redis_memory, bytes), { number: true }],
  ];
  return html`<h1>Projects</h1>
    <h2>Active runs</h2><${Loaded} of=${projects} what="the projects">${(found) => html`<${Table} caption="Projects and their quotas" columns=${quotas} rows=${found.projects} keyOf=${({ name }) => name} empty="You can see no project." />`}<//>
    <h2>Ledger</h2><${Loaded} of=${ledgers} what="the ledgers">${(found) => html`<${Ledgers} found=${found} />`}<//>`;
}

function Ledgers({ found }) {
  const columns = [
    ["Project", ({ project }) => project, { head: true }], ["Runs", ({ runs }) => number(runs), { number: true }],
    ["Tokens generated", ({ tokens }) => number(tokens.generated), { number: true }], ["Tokens trained", ({ tokens }) => number(tokens.trained), { number: true }],
    ["GPU hours", (row) => hours(row.gpu_seconds), { number: true }], ["CPU hours", (row) => hours(row.cpu_seconds), { number: true }],
    ["Cost", ({ cost }) => money(cost, found.currency), { number: true }],
  ];
  return html`<${Table} caption="What projects have used, deleted runs included" columns=${columns} rows=${found.projects} keyOf=${({ project }) => project} empty="Nothing is accounted yet." />
    ${found.projects.filter(({ rows }) => rows.some(({ share }) => share > 0)).map(({ project, rows }) => html`
      <${Shares} key=${project} title=${`Time of ${project}`} parts=${rows.map(({ use, share }) => [use, use.replaceAll("_", " "), share])} />`)}`;
}
