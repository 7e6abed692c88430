// Owns text whose tokens are coloured by a value. Must not compute the values.
import { html } from "../vendor/vendor.js";
import { number } from "../app/format.js";

// Light to dark of one hue for log-probs; two hues around white for advantages; distinct ones for versions. Ink is dark.
const PROBABLE = ["#ffb4a8", "#ffd0b8", "#ffe7c9", "#f3f0d7", "#dff0e4"];
const NEGATIVE = ["#ffb4a8", "#ffd6cf"], POSITIVE = ["#cfe8d6", "#9fd8b4"], NEUTRAL = "#eceff2";
const VERSIONS = ["#cfe2fa", "#fbdcc2", "#cdebd8", "#ead3f2", "#f6e6a8", "#d8dde3"];

const BY = {
  logprob: { title: "log-probability", color: ({ logprob }) => (logprob === null || logprob === undefined ? NEUTRAL : PROBABLE[Math.min(4, Math.floor(5 * Math.exp(logprob)))]),
    scale: [["unlikely", PROBABLE[0]], ["", PROBABLE[1]], ["", PROBABLE[2]], ["", PROBABLE[3]], ["likely", PROBABLE[4]]] },
  advantage: { title: "advantage", color: (_, { advantage }) => (!advantage ? NEUTRAL : advantage < 0 ? NEGATIVE[advantage < -1 ? 0 : 1] : POSITIVE[advantage > 1 ? 1 : 0]),
    scale: [["negative", NEGATIVE[0]], ["", NEGATIVE[1]], ["0", NEUTRAL], ["", POSITIVE[0]], ["positive", POSITIVE[1]]] },
  version: { title: "policy version", color: ({ version }) => (version === null || version === undefined ? NEUTRAL : VERSIONS[version % VERSIONS.length]), scale: [] },
};
export const COLOURINGS = Object.entries(BY).map(([name, { title }]) => [name, title]);

const shown = (text) => (text === "" ? "·" : text.replaceAll("\n", "⏎\n"));

/** `tokens`: {text, id, logprob, version}; `sample`: {advantage}. */
export function Tokens({ tokens, sample, by }) {
  const { color, scale } = BY[by];
  const versions = by === "version" ? [...new Set(tokens.map(({ version }) => version))] : [];
  const legend = versions.length ? versions.map((version) => [`version ${version}`, color({ version })]) : scale;
  return html`<div>
    <p class="row">${legend.map(([word, tint]) => html`<span><span class="scale" aria-hidden="true"><i style=${{ background: tint }}></i></span> ${word}</span>`)}</p>
    <div class="tokens">${tokens.map((token, at) => html`<span key=${at} style=${{ background: color(token, sample) }}
      title=${`token ${token.id}, log-prob ${number(token.logprob)}, version ${token.version ?? "–"}`}>${shown(token.text)}</span>`)}</div></div>`;
}
