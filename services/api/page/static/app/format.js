// Owns how values are written. Must not draw anything.
const PLACES = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const WHOLE = new Intl.NumberFormat("en");

export const number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return WHOLE.format(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : PLACES.format(value);
};
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
export const signed = (value) => (value === null || value === undefined ? "–" : `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(3)}`);

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}
export const ago = (at, now = Date.now() / 1000) => `${duration(now - at)} ago`;
export const time = (at) => new Date(at * 1000).toLocaleString();
export const clock = (at) => new Date(at * 1000).toLocaleTimeString();
/** Two decimals, or four of a small amount, which a run on a laptop has. */
const figure = (amount) => { const places = amount >= 1 || amount === 0 ? 2 : 4; return amount.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places }); };
export const hours = (seconds) => figure(seconds / 3600);
export const money = (amount, currency) => (amount === null || amount === undefined ? "–" : `${figure(amount)} ${currency ?? ""}`.trim());
export const bytes = (size) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; size >= 1024 && at < units.length - 1; at += 1) size /= 1024;
  return `${at ? size.toFixed(1) : size} ${units[at]}`;
};
