// Owns the start of the page and its frame: who is signed in, where you are, the view.
import { html, render, useEffect } from "./vendor/vendor.js";
import { get, signOut, token } from "./app/api.js";
import { useLoaded } from "./app/live.js";
import { link, route, startRouter } from "./app/router.js";
import { Problem } from "./parts/common.js";
import { Toasts } from "./parts/toasts.js";
import { Compare } from "./views/compare.js";
import { Create } from "./views/create.js";
import { Group } from "./views/group.js";
import { Projects } from "./views/projects.js";
import { Queue } from "./views/queue.js";
import { Run } from "./views/run.js";
import { Runs } from "./views/runs.js";
import { SignIn } from "./views/sign_in.js";

const VIEWS = { runs: Runs, run: Run, group: Group, compare: Compare, create: Create, queue: Queue, projects: Projects };
const PLACES = [["Runs", ["runs"], "runs"], ["Compare", ["compare"], "compare"], ["Queue", ["queue"], "queue"], ["Projects", ["projects"], "projects"]];

function placeOf(parts) {
  if (parts[0] === "runs" && parts[2] === "groups" && parts[3]) return "group";
  if (parts[0] === "runs" && parts[1]) return "run";
  return VIEWS[parts[0]] ? parts[0] : "runs";
}

function Page() {
  if (!token.value) return html`<${SignIn} />`;
  return html`<${Signed} key=${token.value} />`;
}

function Signed() {
  const { value: me, error } = useLoaded((signal) => get("/v1/whoami", {}, { signal }), []);
  const { parts, params } = route.value;
  const place = placeOf(parts);
  const View = VIEWS[place];
  useEffect(() => {
    document.title = parts[1] ? `${parts[1]} · Penstock` : "Penstock";
    document.getElementById("content")?.focus({ preventScroll: true });
  }, [parts.join("/")]);
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); document.getElementById("content").focus(); }}>Skip to content</a>
    <header class="bar">
      <a class="brand" href=${link(["runs"])}><img src="/page/icon.svg" alt="" width="24" height="24" /> Penstock</a>
      <nav aria-label="Pages">
        ${PLACES.map(([title, to, name]) => html`<a href=${link(to)} aria-current=${place === name ? "page" : undefined}>${title}</a>`)}
        <a href="/docs">API</a>
      </nav>
      <span class="me">
        ${me && html`<span title=${rolesText(me)}>${me.name}</span>`}
        <button type="button" class="quiet" onClick=${signOut}>Sign out</button>
      </span>
    </header>
    <main id="content" tabindex="-1">
      ${error && error.status !== 401 && html`<${Problem} error=${error} />`}
      <${View} parts=${parts} params=${params} me=${me ?? { name: "", roles: {} }} />
    </main>
    <${Toasts} />`;
}

const rolesText = (me) => Object.entries(me.roles ?? {}).map(([project, role]) => `${project === "*" ? "every project" : project}: ${role}`).join(", ");

startRouter();
render(html`<${Page} />`, document.getElementById("page"));
