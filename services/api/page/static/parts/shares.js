// Owns a bar that shows shares of a whole. Must not compute them.
import { html } from "../vendor/vendor.js";
import { percent } from "../app/format.js";

/** `parts`: [kind, title, share]. The kind chooses the colour (styles.css); the legend says all of it in words. */
export function Shares({ title, parts }) {
  const shown = parts.filter(([, , share]) => share > 0);
  const told = shown.map(([, name, share]) => `${name} ${percent(share)}`).join(", ");
  return html`<figure class="chart shares"><figcaption>${title}</figcaption>
    <div class="stack" role="img" aria-label=${`${title}: ${told || "none yet"}`}>
      ${shown.map(([kind, name, share]) => html`<span key=${kind} class=${`use ${kind}`} style=${{ flexGrow: share }} title=${`${name} ${percent(share)}`}></span>`)}</div>
    <ul class="legend" aria-hidden="true">${shown.length ? shown.map(([kind, name, share]) => html`<li key=${kind}><i class=${`use ${kind}`}></i>${name} <span class="number">${percent(share)}</span></li>`) : html`<li>none yet</li>`}</ul></figure>`;
}
