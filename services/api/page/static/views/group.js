// Owns the story of one group: prompt, attempts, samples, verdicts, why it was kept or dropped, step, checkpoint.
import { html, useState } from "../vendor/vendor.js";
import { get, runPath } from "../app/api.js";
import { clock, number, signed } from "../app/format.js";
import { useLoaded } from "../app/live.js";
import { link } from "../app/router.js";
import { Facts, Loaded } from "../parts/common.js";
import { COLOURINGS, Tokens } from "../parts/tokens.js";

export function Group({ parts, params }) {
  const [, run, , name] = parts;
  const found = useLoaded((signal) => get(runPath(run, `/groups/${encodeURIComponent(name)}`), {}, { signal }), [run, name]);
  return html`<p><a href=${link(["runs", run, "samples"])}>← Samples of ${run}</a></p>
    <h1>Group ${name}</h1>
    <${Loaded} of=${found} what="the group">${(group) => html`
      <${Facts} facts=${[["Lane", group.lane], ["Prompt", group.prompt?.id], ["Fate", group.release ?? "pending"], ["Attempts", group.attempts.length]]} />
      ${group.problem && html`<p class="note">${group.problem}</p>`}
      <ol class="path">
        <li><h2>Prompt</h2>${(group.prompt?.messages ?? []).map((message) => html`<p><strong>${message.role}</strong></p><p class="text">${message.content}</p>`)}
          <${Facts} facts=${[["Verifier", group.prompt?.verifier], ["Reference", group.prompt && html`<code>${JSON.stringify(group.prompt.reference)}</code>`]]} /></li>
        ${group.attempts.map((attempt) => html`<${Attempt} key=${attempt.resumption} attempt=${attempt} open=${Number(params.sample ?? 0)} />`)}
      </ol>`}<//>`;
}

function Attempt({ attempt, open }) {
  return html`
    <li><h2>${attempt.resumption ? `Resumption ${attempt.resumption}: samples` : "Samples"}</h2>${attempt.samples.map((sample) => html`<${Sample} key=${sample.index} sample=${sample} open=${sample.index === open} />`)}</li>
    <li><h2>${attempt.release ? `Released: ${attempt.release}` : "Not released yet"}</h2><p>${attempt.reason ?? ""}</p></li>
    ${attempt.step !== null && attempt.step !== undefined && html`<li><h2>Optimizer step</h2>
      <${Facts} facts=${[["Rollout step", attempt.step], ["Published as version", attempt.version], ["Staleness", attempt.staleness], ["Learning rate", attempt.learning_rate]]} />
      <p>${optimizerText(attempt)}</p></li>
    <li><h2>Checkpoint</h2><p>${attempt.checkpoint ?? "No checkpoint holds this step yet."}</p></li>`}`;
}

function optimizerText({ optimizer_step: at, optimizer, optimizer_steps: applied }) {
  if (at === null || at === undefined) return `The archive does not say which of the optimizer steps of this rollout step trained it${applied ? `; ${applied} were applied` : ""}.`;
  const figures = optimizer && (optimizer.applied ? `loss ${number(optimizer.loss)}, gradient norm ${number(optimizer.gradient_norm)}` : "skipped, because its gradient was not finite");
  return `Optimizer step ${at} of this rollout step trained it${figures ? `: ${figures}` : ""}.`;
}

function Sample({ sample, open }) {
  const [by, setBy] = useState("logprob");
  const pick = `colour-${sample.index}`;
  return html`<details open=${open}><summary><strong>Sample ${sample.index}</strong>: <span class=${sample.outcome ?? ""}>${sample.outcome ?? "no verdict yet"}</span>, score ${number(sample.score)}, advantage ${signed(sample.advantage)}, ${number(sample.response_tokens)} tokens</summary>
    <${Facts} facts=${[["Reason", sample.reason], ["Answer found", sample.answer], ["Reward", signed(sample.reward)], ["Masked", sample.masked ? "yes" : null], ["Finish", sample.finish_reason],
      ["Replica", sample.replica], ["Generated", sample.finished_at && clock(sample.finished_at)], ["Versions", (sample.spans ?? []).map((span) => `${span.version}: ${span.end - span.start > 1 ? `tokens ${span.start}–${span.end - 1}` : `token ${span.start}`}`).join("; ")],
      ...Object.entries(sample.rewards ?? {}).map(([name, score]) => [`Reward ${name}`, number(score)])]} />
    ${sample.tokens.length && sample.tokens[0].text !== null ? html`<label for=${pick}>Colour by</label> <select id=${pick} value=${by} onChange=${(event) => setBy(event.target.value)}>${COLOURINGS.map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select>
      <${Tokens} tokens=${sample.tokens} sample=${sample} by=${by} />` : html`<p class="text">${sample.text ?? "The response has left Redis and is not archived."}</p>`}
  </details>`;
}
