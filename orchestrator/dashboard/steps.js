// The steps of a job, as its events tell them.

/** The steps whose results count: a job that was begun again drops what came after the place where it was taken up. */
export function chain(steps) {
  const kept = [];
  for (const step of steps) {
    while (kept.length > 0 && kept.at(-1).end > step.start) kept.pop();
    kept.push(step);
  }
  return kept;
}

/** Slowest rank over the mean of all; null with fewer than two ranks. */
export function imbalance(step) {
  const times = step.rank_seconds ?? [];
  const sum = times.reduce((total, time) => total + time, 0);
  return times.length < 2 || sum === 0 ? null : (Math.max(...times) * times.length) / sum;
}

/** Pieces of a prompt for a bar: at most `most`, neighbours joined; [tokens, words]. */
export function pieces(steps, most) {
  const size = Math.max(1, Math.ceil(steps.length / most));
  const found = [];
  for (let first = 0; first < steps.length; first += size) {
    const last = Math.min(first + size, steps.length) - 1;
    found.push([steps[last].end - steps[first].start, first === last ? `step ${steps[first].number}` : `steps ${steps[first].number} to ${steps[last].number}`]);
  }
  return found;
}

const LANES = ["phase", "step", "layer", "kernel", "collective", "wait", "host"];

/**
 * Rows for the timeline from a Chrome trace: one for each process, a lane for each kind of span; seconds.
 * [{ label, lanes: [{ category, spans: [{ name, start, end, layer }] }] }]
 */
export function rowsOfTrace(trace) {
  const labels = new Map();
  const rows = new Map();
  for (const event of trace.traceEvents) {
    if (event.ph === "M" && event.name === "process_name") labels.set(event.pid, event.args.name);
    if (event.ph !== "X") continue;
    if (!rows.has(event.pid)) rows.set(event.pid, new Map());
    const lanes = rows.get(event.pid);
    if (!lanes.has(event.cat)) lanes.set(event.cat, []);
    lanes.get(event.cat).push({ name: event.name, start: event.ts / 1e6, end: (event.ts + event.dur) / 1e6, layer: event.args?.layer ?? null });
  }
  return [...rows].sort(([a], [b]) => a - b).map(([pid, lanes]) => ({
    label: labels.get(pid) ?? `process ${pid}`,
    lanes: [...lanes].sort(([a], [b]) => LANES.indexOf(a) - LANES.indexOf(b)).map(([category, spans]) => ({ category, spans: spans.sort((a, b) => a.start - b.start) })),
  }));
}

/** The same from the job's events alone: phases, steps, and in each step how long each rank worked. */
export function rowsOfEvents(events, now) {
  if (events.length === 0) return [];
  const origin = events[0].at;
  const states = events.filter((event) => event.kind === "state");
  const phases = states
    .map((event, index) => ({ name: event.data.state.replaceAll("_", " "), start: event.at - origin, end: (states[index + 1]?.at ?? now) - origin, layer: null }))
    .filter((_, index) => !["done", "failed", "cancelled"].includes(states[index].data.state));
  const steps = [];
  const ranks = new Map();
  for (const { at, kind, data } of events) {
    if (kind !== "step" || typeof data.seconds !== "number") continue;
    const start = at - origin - data.seconds;
    steps.push({ name: `step ${data.number}`, start, end: at - origin, layer: null });
    (data.rank_seconds ?? []).forEach((time, rank) => {
      const label = `${data.group} rank ${rank}`;
      if (!ranks.has(label)) ranks.set(label, []);
      ranks.get(label).push({ name: `step ${data.number}`, start, end: start + time, layer: null });
    });
  }
  return [
    { label: "controller", lanes: [{ category: "phase", spans: phases }, { category: "step", spans: steps }] },
    ...[...ranks].map(([label, spans]) => ({ label, lanes: [{ category: "step", spans }] })),
  ];
}

/** Seconds by category of each rank: [{ label, seconds: { category: s } }]; the controller is left out. */
export function secondsByRank(rows) {
  return rows
    .filter((row) => row.label !== "controller")
    .map(({ label, lanes }) => ({
      label,
      seconds: Object.fromEntries(lanes.map(({ category, spans }) => [category, spans.reduce((sum, span) => sum + span.end - span.start, 0)])),
    }));
}
