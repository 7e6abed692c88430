// Owns the inputs of a JSON schema: one per value, a group per section. Must not validate.
import { html, useState } from "../vendor/vendor.js";

/** A schema with its reference followed, and of several forms the one that is not null. */
export function resolved(schema, root) {
  let found = schema;
  for (let depth = 0; depth < 8; depth += 1) {
    if (found.$ref) found = { ...root.$defs[found.$ref.split("/").at(-1)], ...without(found, "$ref") };
    else if (found.allOf?.length === 1) found = { ...found.allOf[0], ...without(found, "allOf") };
    else if (found.anyOf) {
      const forms = found.anyOf.filter(({ type }) => type !== "null");
      if (forms.length !== 1) return { ...found, type: "json", optional: true };
      found = { ...forms[0], ...without(found, "anyOf"), optional: forms.length < found.anyOf.length };
    } else break;
  }
  return found;
}
const without = (schema, name) => Object.fromEntries(Object.entries(schema).filter(([key]) => key !== name));

export function Fields({ rules, entries, path, document, set, faults, value }) {
  return entries.map(([name, schema]) => {
    const shape = resolved(schema, rules), here = [...path, name], key = here.join(".");
    if (shape.properties) {
      const inner = Object.entries(shape.properties);
      const body = html`<${Fields} rules=${rules} entries=${inner} path=${here} document=${document} set=${set} faults=${faults} value=${value} />`;
      if (path.length === 0) return html`<fieldset key=${key}><legend>${name}</legend><div class="row">${body}</div></fieldset>`;
      const open = value(document, here) !== undefined && value(document, here) !== null || Object.keys(faults).some((fault) => fault.startsWith(`${key}.`));
      return html`<details key=${key} class="inner" open=${open}><summary>${name}</summary><div class="row">${body}</div></details>`;
    }
    return html`<${Field} key=${key} name=${name} shape=${shape} now=${value(document, here)} set=${(next) => set(here, next)} fault=${faults[key]} id=${`field-${key}`} />`;
  });
}

function Field({ name, shape, now, set, fault, id }) {
  const common = { id, "aria-invalid": fault ? "true" : undefined, "aria-describedby": fault ? `${id}-fault` : undefined, title: shape.description };
  const hint = shape.default !== undefined && shape.default !== null ? String(typeof shape.default === "object" ? JSON.stringify(shape.default) : shape.default) : "";
  return html`<div class="field"><label for=${id}>${name}</label>${input(shape, now, set, common, hint)}
    ${fault && html`<span class="fault" id=${`${id}-fault`}>${fault}</span>`}</div>`;
}

function input(shape, now, set, common, hint) {
  if (shape.enum || shape.const) {
    return html`<select ...${common} value=${now ?? ""} onChange=${(event) => set(event.target.value === "" ? undefined : (shape.enum ?? [shape.const]).find((word) => String(word) === event.target.value))}>
      <option value="">${hint ? `default: ${hint}` : "–"}</option>${(shape.enum ?? [shape.const]).map((word) => html`<option value=${word}>${word}</option>`)}</select>`;
  }
  if (shape.type === "boolean") {
    return html`<select ...${common} value=${now === undefined || now === null ? "" : String(now)} onChange=${(event) => set(event.target.value === "" ? undefined : event.target.value === "true")}>
      <option value="">${hint ? `default: ${hint}` : "–"}</option><option value="true">true</option><option value="false">false</option></select>`;
  }
  if (shape.type === "integer" || shape.type === "number") {
    return html`<${Typed} ...${common} inputmode="decimal" placeholder=${hint} shown=${now ?? ""} take=${(text) => set(numeric(text))} />`;
  }
  if (shape.type === "string") {
    return html`<${Typed} ...${common} placeholder=${hint} shown=${now ?? ""} take=${(text) => set(text === "" ? undefined : text)} />`;
  }
  return html`<${Typed} ...${common} placeholder=${hint || "JSON"} spellcheck=${false} shown=${now === undefined ? "" : JSON.stringify(now)} take=${(text) => set(parsed(text))} />`;
}

/** An input that keeps what is being typed, "0." too, whatever is drawn meanwhile; `take` gets it at each key. */
function Typed({ shown, take, ...rest }) {
  const [text, setText] = useState(null);
  return html`<input ...${rest} type="text" value=${text ?? shown} onInput=${(event) => { setText(event.target.value); take(event.target.value); }} onBlur=${() => setText(null)} />`;
}

const numeric = (text) => (text.trim() === "" ? undefined : Number.isNaN(Number(text)) ? text : Number(text));
const parsed = (text) => { if (text.trim() === "") return undefined; try { return JSON.parse(text); } catch { return text; } };
