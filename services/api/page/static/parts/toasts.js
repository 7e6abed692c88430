// Owns short messages about what was done or refused. Must not decide what is said.
import { html, signal } from "../vendor/vendor.js";

const SHOWN_MS = 8000;
const shown = signal([]);
let next = 1;

export function say(text, kind = "done") {
  const id = next++;
  shown.value = [...shown.value, { id, text, kind }];
  setTimeout(() => hide(id), SHOWN_MS);
}
const hide = (id) => { shown.value = shown.value.filter((toast) => toast.id !== id); };

export function Toasts() {
  return html`<div class="toasts" role="status" aria-live="polite">
    ${shown.value.map(({ id, text, kind }) => html`<div key=${id} class=${`toast ${kind}`}>
      <span>${text}</span><button type="button" class="quiet" aria-label="Close" onClick=${() => hide(id)}>×</button></div>`)}
  </div>`;
}
