// The Prometheus text of /metrics.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** Reads all samples; find them with `value` and `byLabel`. */
export function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

/** The sum of a metric's samples, null when there are none. */
export function value(samples, name, labels = {}) {
  const own = samples.filter((sample) => sample.name === name && Object.entries(labels).every(([key, wanted]) => sample.labels[key] === wanted));
  return own.length === 0 ? null : own.reduce((sum, sample) => sum + sample.value, 0);
}

/** Tokens prefilled a second over the last `window_s` seconds, from the counter's readings. */
export class Rate {
  constructor(window_s = 15) {
    this.window_s = window_s;
    this.readings = [];
  }

  /** The rate after one more reading; null until there are two. A counter that went back began again. */
  add(at, total) {
    const last = this.readings.at(-1);
    if (last && total < last.total) this.readings = [];
    this.readings.push({ at, total });
    while (this.readings.length > 2 && this.readings[1].at <= at - this.window_s) this.readings.shift();
    const first = this.readings[0];
    return at > first.at ? (total - first.total) / (at - first.at) : null;
  }
}
