// Owns what may be done with a run, by its state and your role. Must not decide what is allowed: the API does.
import { html, useState } from "../vendor/vendor.js";
import { call, runPath } from "../app/api.js";
import { go } from "../app/router.js";
import { Dialog } from "./common.js";
import { EditSettings } from "./edit.js";
import { say } from "./toasts.js";

const RANK = { viewer: 1, operator: 2, admin: 3 };
const ENDED = ["succeeded", "failed", "cancelled"];

export const roleIn = (me, project) => Math.max(0, RANK[me.roles?.[project]] ?? 0, RANK[me.roles?.["*"]] ?? 0);

export function Actions({ view, me, done }) {
  const [asked, setAsked] = useState("");
  const [busy, setBusy] = useState(false);
  const role = roleIn(me, view.project);
  const run = async (what, method, path, body, params) => {
    setBusy(true);
    try {
      await call(method, runPath(view.id, path), { body, params });
      say(`${what}: accepted`);
      setAsked("");
      done();
      return true;
    } catch (error) {
      say(error.message, "bad");
      return false;
    } finally {
      setBusy(false);
    }
  };
  const alive = !ENDED.includes(view.state);
  const waits = view.state === "running" && view.pause_requested;
  const buttons = [
    [role >= 2 && view.state === "running" && !waits, "Pause", () => run("Pause", "POST", "/pause")],
    [role >= 2 && (view.state === "paused" || waits), "Resume", () => run("Resume", "POST", "/resume")],
    [role >= 2 && ["failed", "cancelled"].includes(view.state) && !view.closing, "Resume", () => run("Resume", "POST", "/resume")],
    [role >= 2 && alive, "Scale", () => setAsked("scale")],
    [role >= 2 && view.state !== "succeeded" && !view.closing && view.recipe, "Edit", () => setAsked("edit")],
    [role >= 2, "Clone", () => go(["create"], { from: view.id })],
    [role >= 2 && alive && !view.cancel_requested, "Cancel", () => setAsked("cancel"), "danger"],
    [role >= 2 && !alive && !view.closing, "Archive", () => setAsked("archive")],
    [role >= 3 && !alive, "Delete", () => setAsked("delete"), "danger"],
  ];
  return html`<div class="row" role="group" aria-label="Actions">
    ${buttons.filter(([shown]) => shown).map(([, title, act, kind]) => html`<button type="button" class=${kind} disabled=${busy} onClick=${act}>${title}</button>`)}
    ${asked === "scale" && html`<${Scale} view=${view} busy=${busy} run=${run} close=${() => setAsked("")} />`}
    ${asked === "edit" && html`<${EditSettings} run=${view.id} close=${() => setAsked("")} done=${done} />`}
    ${asked === "cancel" && html`<${Dialog} title="Cancel this run?" close=${() => setAsked("")}>
      <p>Its processes stop within seconds. It can be resumed later, from its last rollout step.</p>
      <div class="row"><button type="button" class="danger" disabled=${busy} onClick=${() => run("Cancel", "POST", "/cancel")}>Cancel the run</button>
      <button type="button" autofocus onClick=${() => setAsked("")}>Keep it</button></div><//>`}
    ${asked === "archive" && html`<${Dialog} title="Archive this run?" close=${() => setAsked("")}>
      <p>Redis lets its groups go; metrics, events and files stay. It can no longer be resumed.</p>
      <div class="row"><button type="button" class="main" disabled=${busy} onClick=${() => run("Archive", "POST", "/archive")}>Archive the run</button>
      <button type="button" autofocus onClick=${() => setAsked("")}>Keep it</button></div><//>`}
    ${asked === "delete" && html`<${Delete} view=${view} busy=${busy} run=${run} close=${() => setAsked("")} />`}
  </div>`;
}

function Scale({ view, busy, run, close }) {
  const now = { rollout: view.rollout_replicas, verifier: view.recipe?.verifier.replicas };
  const submit = async (event) => {
    event.preventDefault();
    const wanted = [...new FormData(event.target)].map(([name, count]) => [name, Number(count)]).filter(([name, count]) => count !== now[name]);
    if (wanted.length) await run("Scale", "PATCH", "/scale", Object.fromEntries(wanted));
    else close();
  };
  const field = (name, title) => html`<label>${title} <input type="number" name=${name} min="1" max="1024" required defaultValue=${now[name]} /></label>`;
  return html`<${Dialog} title="Scale this run" close=${close}><form onSubmit=${submit}>
    <div class="row">${field("rollout", "Rollout replicas")}${now.verifier !== undefined && field("verifier", "Verifiers")}</div>
    <p class="row"><button class="main" type="submit" disabled=${busy}>Scale</button><button type="button" onClick=${close}>Close</button></p></form><//>`;
}

function Delete({ view, busy, run, close }) {
  const submit = async (event) => {
    event.preventDefault();
    const files = new FormData(event.target).has("files");
    if (await run("Delete", "DELETE", "", undefined, { files })) go(["runs"]);
  };
  return html`<${Dialog} title=${`Delete ${view.id}?`} close=${close}><form onSubmit=${submit}>
    <p>All that Redis holds of it is deleted: groups, metrics, events. It can no longer be resumed.</p>
    <label class="row"><input type="checkbox" name="files" /> also its files: checkpoints, export, archive</label>
    <p class="row"><button class="danger" type="submit" disabled=${busy}>Delete</button><button type="button" onClick=${close}>Keep it</button></p></form><//>`;
}
