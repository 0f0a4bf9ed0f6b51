// Figures for people.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (value) => WHOLE.format(value);

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** Seconds as measured: three figures below a minute, then minutes, hours, days. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Seconds that nobody needs exactly: ages and estimates. */
export function roughly(value) {
  if (value === null || value === undefined) return "–";
  return value < 60 ? `${Math.max(0, Math.round(value))} s` : seconds(value);
}

/** Rounded down: all is only said of all. */
export function percent(part, whole) {
  return whole > 0 ? `${Math.floor((100 * part) / whole)} %` : "–";
}

export function clockTime(at) {
  return at === null || at === undefined ? "–" : new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

export function ratio(value) {
  return value.toFixed(value < 10 ? 3 : 1);
}

export const now = () => Date.now() / 1000;

const TONES = { queued: "idle", prefilling: "busy", handing_off: "busy", generating: "busy", done: "good", failed: "bad", cancelled: "idle" };

/** How a job's state is shown: [words, tone]. */
export function jobState(state) {
  return [String(state).replaceAll("_", " "), TONES[state] ?? "idle"];
}

export const isFinal = (state) => state === "done" || state === "failed" || state === "cancelled";
