// Owns the address: which view, of which run, with which filters. Must not draw anything.
import { signal } from "../vendor/vendor.js";
import { signIn } from "./api.js";

const parse = (text) => {
  const [path, search] = text.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), params: Object.fromEntries(new URLSearchParams(search ?? "")) };
};

/** The address as parts and parameters: `#/runs/ID/samples?step=3` is [runs, ID, samples] and {step: "3"}. */
export const route = signal(parse(""));

export const link = (parts, params = {}) => {
  const given = Object.entries(params).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  return `#/${parts.map(encodeURIComponent).join("/")}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
};
export const go = (parts, params) => { location.hash = link(parts, params); };
export const setParams = (params) => history.replaceState(null, "", link(route.value.parts, { ...route.value.params, ...params }))
  ?? read();

function read() {
  const found = location.hash.match(/^#token=(.+)$/);
  if (found) {  // the link that `penstock up` prints; the token must not stay in the address
    signIn(decodeURIComponent(found[1]));
    history.replaceState(null, "", "#/runs");
  }
  route.value = parse(location.hash || "#/runs");
}

export function startRouter() {
  addEventListener("hashchange", read);
  read();
}
