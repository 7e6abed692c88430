// Owns small pieces that views share: states, problems, empty places, tables, dialogs.
import { html, useEffect, useRef } from "../vendor/vendor.js";

const MARKS = { queued: "◷", starting: "◔", running: "▶", paused: "‖", succeeded: "✓", failed: "✕", cancelled: "⊘" };

/** A state as a word with a mark, so that colour alone never says it. */
export const State = ({ state, note }) =>
  html`<span class=${`state ${state}`}><span aria-hidden="true">${MARKS[state] ?? "?"}</span> ${state}${note ? html` <small>(${note})</small>` : ""}</span>`;

export const Problem = ({ error, retry }) => html`<div class="problem" role="alert">
  <strong>${error.status === 0 ? "No answer" : error.status === 403 ? "Not allowed" : "That did not work"}</strong>
  <pre>${error.message}</pre>${retry && html`<button type="button" onClick=${retry}>Try again</button>`}</div>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
export const Busy = ({ what }) => html`<p class="empty" role="status">Loading ${what} …</p>`;

/** Either the problem, or that it loads, or the children of what was loaded. */
export const Loaded = ({ of, what, children }) => {
  if (of.value === undefined) return of.error ? html`<${Problem} error=${of.error} retry=${of.again} />` : html`<${Busy} what=${what} />`;
  return html`${of.error && html`<${Problem} error=${of.error} retry=${of.again} />`}${children(of.value)}`;
};

/** A table that scrolls by itself where the screen is narrow. `columns`: [title, cell(row), {number, head}]. */
export const Table = ({ caption, columns, rows, keyOf, empty = "Nothing here." }) =>
  rows.length === 0 ? html`<${Empty}>${empty}<//>` : html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
  <table><caption class="hidden">${caption}</caption>
    <thead><tr>${columns.map(([title, , options = {}]) => html`<th scope="col" class=${options.number ? "number" : ""}>${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${keyOf(row)}>${columns.map(([, cell, options = {}]) =>
      options.head ? html`<th scope="row">${cell(row)}</th>` : html`<td class=${options.number ? "number" : ""}>${cell(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;

/** A question before something that cannot be undone, or that needs a value. The focus stays in it, and returns then. */
export function Dialog({ title, children, close }) {
  const box = useRef(null), before = useRef(document.activeElement);
  useEffect(() => {
    const dialog = box.current;
    dialog.showModal();
    return () => { dialog.close(); before.current?.focus(); };  // while it is open, nothing outside can have the focus
  }, []);
  return html`<dialog ref=${box} onClose=${close} onCancel=${close} aria-label=${title}>
    <h2>${title}</h2>${children}</dialog>`;
}

export const Facts = ({ facts }) => html`<dl class="facts">${facts.filter(([, value]) => value !== undefined && value !== null && value !== "").map(
  ([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

/** Tabs as links, so that each has an address. `tabs`: [name, title, href]. */
export const Tabs = ({ tabs, current, label }) => html`<nav class="tabs" aria-label=${label}>
  ${tabs.map(([name, title, href]) => html`<a href=${href} aria-current=${name === current ? "page" : undefined}>${title}</a>`)}</nav>`;
