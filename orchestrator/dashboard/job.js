// One job: progress, where its time went, a timeline of its ranks, its steps, balance and traffic, what it generated.

import { ask, askJson, follow, jobPath, Refusal } from "./api.js";
import { announce, byId, el, LiveTable, setText, stateBadge, updateBadge } from "./dom.js";
import { bytes, clockTime, count, isFinal, jobState, now, percent, plural, ratio, seconds } from "./format.js";
import { expected, showFigures } from "./overview.js";
import { chain, imbalance, pieces, rowsOfEvents, rowsOfTrace, secondsByRank } from "./steps.js";
import { Timeline } from "./timeline.js";

const MOST_PIECES = 120;
const FEW_STEPS = 10;
const MOST_STEPS = 500;
const MOST_CHARACTERS = 200_000;
const MOST_TRACE_BYTES = 48 << 20;
const PHASES = [["queue_s", "queue"], ["prefill_s", "prefill"], ["transfer_s", "transfer"], ["first_decode_s", "first decode"]];
const CATEGORIES = ["step", "layer", "kernel", "collective", "wait", "host"];
const COLUMNS = {
  step: [
    { title: "Step", className: "numbered", text: (step) => count(step.number) },
    { title: "Tokens", className: "number", text: (step) => `${count(step.start)} to ${count(step.end)}` },
    { title: "Time", className: "number", text: (step) => seconds(step.seconds) },
    { title: "Expected", className: "number", text: (step) => seconds(step.estimate_s) },
    { title: "Tokens/s", className: "number", text: (step) => (step.seconds > 0 ? count((step.end - step.start) / step.seconds) : "–") },
    { title: "Slowest rank / mean", className: "number", text: (step) => (imbalance(step) === null ? "–" : ratio(imbalance(step))) },
    { title: "Group", className: "name", text: (step) => String(step.group ?? "–") },
    { title: "Why then", className: "half", text: (step) => String(step.reason ?? "–") },
  ],
  traffic: [
    { title: "Operation", className: "name", text: ([name]) => name },
    { title: "Calls", className: "number", text: ([, sent]) => count(sent.calls) },
    { title: "Sent", className: "number", text: ([, sent]) => bytes(sent.bytes) },
    { title: "By prompt token", className: "number", text: ([, sent, tokens]) => (tokens > 0 ? bytes(sent.bytes / tokens) : "–") },
  ],
  balance: [
    { title: "Work", className: "name", text: ([name]) => name },
    { title: "Largest rank / mean", className: "number", text: ([, value]) => ratio(value) },
  ],
};

export class JobPage {
  constructor({ connection, wake, cancel }) {
    this.connection = connection;
    this.wake = wake;
    this.cancel = cancel;
    this.timeline = null;
  }

  /** Begins to show a job; `signal` ends it. */
  open(job, caller, signal) {
    this.timeline?.close();
    Object.assign(this, { job, signal, view: null, events: [], trace: null, state: null, isRefused: false, mostSteps: FEW_STEPS });
    this.#build();
    signal.addEventListener("abort", () => this.timeline.close(), { once: true });
    this.#follow();
  }

  /** The job as it is now. */
  async refresh(signal) {
    if (this.isRefused || (this.view !== null && isFinal(this.view.state) && this.trace !== null)) return;
    let view;
    try {
      view = await askJson(jobPath(this.job), { signal });
    } catch (error) {
      if (!(error instanceof Refusal) || error.isPassing || error.status === 401) throw error;
      this.#refuse(error);
      return;
    }
    if (signal.aborted || signal !== this.signal) return;
    this.#show(view);
    const wasRunning = this.trace === null || !this.trace.isWhole;
    if (view.traced && wasRunning && isFinal(view.state)) await this.#loadTrace();
    else if (!view.traced && isFinal(view.state)) this.trace = { isWhole: true, rows: null };
  }

  async #follow() {
    const { job, signal } = this;
    try {
      await follow(jobPath(job, "/events"), {
        signal,
        onEvent: (event) => {
          this.events.push(event);
          this.#scheduleSteps();
          this.wake();
        },
        onOpen: () => this.connection.heard("stream"),
        onLost: (error, pause_ms) => this.connection.lose("stream", error, pause_ms),
      });
      this.connection.heard("stream");
    } catch (error) {
      if (!(error instanceof Refusal)) throw error; // the page itself is told by refresh()
    }
  }

  #build() {
    const part = (title, ...children) => el("section", { "aria-label": title }, el("h3", {}, title), ...children);
    this.parts = {
      state: stateBadge("loading", "idle"),
      cancel: el("button", { type: "button", class: "danger", hidden: true, onclick: () => this.cancel(this.job) }, "Cancel the job"),
      reason: el("p", { class: "note" }),
      bar: el("div", { class: "steps-bar", role: "progressbar", "aria-label": "Prefill", "aria-valuemin": "0" }),
      progress: el("p", { class: "muted" }),
      facts: el("dl", { class: "figures" }),
      ttft: el("div", { class: "split", role: "img" }),
      ttftFacts: el("dl", { class: "figures" }),
      timeline: el("div"),
      traceNote: el("p", { class: "muted" }),
      traceLoad: el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.#loadTrace() }, "Load the ranks' spans"),
      traceSave: el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.#saveTrace() }, "Save as Chrome trace"),
      ranks: el("div"),
      steps: el("div"),
      moreSteps: el("button", { type: "button", class: "quiet more", hidden: true, onclick: () => { this.mostSteps = MOST_STEPS; this.#showSteps(); } }),
      balance: el("div"),
      traffic: el("div"),
      reportFacts: el("p", { class: "muted" }),
      output: el("div"),
      request: el("dl", { class: "pairs" }),
    };
    const p = this.parts;
    p.body = el(
      "div", {},
      part("Progress", p.bar, p.progress, p.facts),
      part("Time to first token", p.ttft, p.ttftFacts),
      part("Timeline", p.timeline, el("div", { class: "tools" }, p.traceLoad, p.traceSave), p.traceNote, p.ranks),
      part("Steps", p.steps, p.moreSteps),
      el("div", { class: "beside" }, part("Balance over ranks", p.balance, p.reportFacts), part("Sent between ranks", p.traffic)),
      el("details", { ontoggle: (event) => this.#showOutput(event.currentTarget) }, el("summary", {}, "Generated text"), p.output),
      el("details", {}, el("summary", {}, "Request"), p.request),
    );
    byId("job").replaceChildren(
      el("a", { href: "#/", class: "back" }, "← All jobs"),
      el("div", { class: "title" }, el("h2", { id: "job-title", class: "id" }, this.job), p.state, p.cancel),
      p.reason,
      p.body,
    );
    this.timeline = new Timeline(p.timeline);
    const table = (place, caption, columns, key, empty, cards) => new LiveTable({ place, caption, columns, key, empty, cards });
    this.stepTable = table(p.steps, "Steps, newest first", COLUMNS.step, (step) => `${step.number} ${step.start}`, "No step has ended yet.", true);
    this.balanceTable = table(p.balance, "Counted work over ranks", COLUMNS.balance, ([name]) => name, "Known when the prompt is prefilled.");
    this.trafficTable = table(p.traffic, "Bytes by operation", COLUMNS.traffic, ([name]) => name, "Nothing was sent yet.", true);
    this.rankTable = null;
    p.body.hidden = true;
  }

  #refuse(error) {
    this.isRefused = true;
    this.parts.body.hidden = true;
    updateBadge(this.parts.state, error.status === 404 ? "unknown" : "refused", "bad");
    setText(this.parts.reason, error.message);
    this.parts.reason.className = "refusal";
  }

  #show(view) {
    this.view = view;
    const p = this.parts;
    const [word, tone] = jobState(view.state);
    if (this.state !== null && this.state !== view.state) announce(`Job ${this.job} is ${word}${view.reason ? `: ${view.reason}` : ""}`);
    this.state = view.state;
    updateBadge(p.state, word, tone);
    p.cancel.hidden = isFinal(view.state);
    p.reason.className = view.state === "failed" ? "refusal" : "note";
    const waiting = expected(view);
    setText(p.reason, [view.reason, waiting === "–" ? null : `expected: ${waiting}`].filter(Boolean).join("; "));
    p.body.hidden = false;
    showFigures(p.facts, this.#facts(view));
    this.#showTtft(view.timings);
    this.#showReport(view);
    this.#showRequest(view);
    this.#showSteps();
  }

  #facts(view) {
    const cached = view.cached_tokens > 0 ? `${count(view.cached_tokens)} from a cache` : "none from a cache";
    return [
      ["Tenant", view.tenant, ""],
      ["Prompt", plural(view.prompt_tokens, "token"), cached],
      ["Generated", plural(view.generated_tokens, "token"), `of at most ${count(view.request.max_new_tokens * view.request.num_samples)}`],
      ["Where", view.group ?? "–", view.decode_worker ?? "no decode worker"],
      ["Accepted", clockTime(view.created_at), view.finished_at === null ? "" : `ended ${clockTime(view.finished_at)}`],
      ["Attempts", count(view.num_attempts), `given way ${plural(view.num_preemptions, "time")}`],
    ];
  }

  #showTtft(timings) {
    const p = this.parts;
    const known = PHASES.filter(([name]) => timings[name] !== null);
    const whole = known.reduce((sum, [name]) => sum + timings[name], 0);
    const words = known.map(([name, word]) => `${word} ${seconds(timings[name])}`).join(", ");
    p.ttft.setAttribute("aria-label", words === "" ? "not known yet" : words);
    if (p.ttft.children.length === 0) p.ttft.replaceChildren(...PHASES.map(([name]) => el("span", { "data-phase": name })));
    PHASES.forEach(([name], index) => { p.ttft.children[index].style.flexGrow = String(whole > 0 ? (timings[name] ?? 0) / whole : 0); });
    showFigures(p.ttftFacts, [
      ...PHASES.map(([name, word]) => [word, seconds(timings[name]), timings[name] === null ? "not yet" : `${Math.round((100 * timings[name]) / (whole || 1))} %`]),
      ["first token after", seconds(timings.ttft_s), ""],
      ["whole job", seconds(timings.total_s), ""],
    ]);
    [...p.ttftFacts.children].slice(0, PHASES.length).forEach((figure, index) => { figure.dataset.phase = PHASES[index][0]; });
  }

  #showReport(view) {
    const report = view.report ?? {};
    this.balanceTable.show(Object.entries(report.imbalance ?? {}));
    this.trafficTable.show(Object.entries(report.comm ?? {}).map(([name, sent]) => [name, sent, view.position]));
    const facts = [];
    if (report.handoff?.bytes) facts.push(`Hand-off: ${bytes(report.handoff.bytes)} in ${seconds(report.handoff.seconds)}, of which ${seconds(report.handoff.exposed_s)} not hidden by prefill.`);
    if (report.peak_rss_bytes?.length) facts.push(`Peak memory by rank: ${report.peak_rss_bytes.map(bytes).join(", ")}.`);
    if (view.snapshot !== null) facts.push(`Snapshot: ${view.snapshot}`);
    setText(this.parts.reportFacts, facts.join(" "));
  }

  #showRequest(view) {
    const entries = Object.entries(view.request).filter(([, value]) => value !== null);
    this.parts.request.replaceChildren(...entries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, typeof value === "string" ? value : JSON.stringify(value))]));
  }

  /** Draws after a burst of events, not after each. */
  #scheduleSteps() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => {
      this.isScheduled = false;
      if (!this.signal.aborted && this.view !== null) this.#showSteps();
    });
  }

  #showSteps() {
    const { view, parts: p } = this;
    const steps = this.events.filter((event) => event.kind === "step").map((event) => event.data);
    const kept = chain(steps);
    const position = Math.max(view.position, kept.at(-1)?.end ?? 0);
    const left = isFinal(view.state) ? 0 : (kept.at(-1)?.num_steps_left ?? 0);
    const start = kept[0]?.start ?? 0;
    const bar = [...(start > 0 ? [[start, "cached"]] : []), ...pieces(kept, MOST_PIECES)];
    const rest = view.prompt_tokens - (kept.at(-1)?.end ?? 0);
    p.bar.replaceChildren(
      ...bar.map(([tokens, words]) => grown(el("span", { class: "done", title: `${words}: ${plural(tokens, "token")}` }), tokens)),
      ...(rest > 0 ? [grown(el("span", { class: view.state === "prefilling" ? "rest busy" : "rest" }), rest)] : []),
    );
    p.bar.setAttribute("aria-valuemax", view.prompt_tokens);
    p.bar.setAttribute("aria-valuenow", position);
    const words = `${count(position)} of ${plural(view.prompt_tokens, "token")} (${percent(position, view.prompt_tokens)}) in ${plural(kept.length, "step")}`;
    p.bar.setAttribute("aria-valuetext", words);
    setText(p.progress, words + (left > 0 ? `, about ${count(left)} more` : "") + (steps.length > kept.length ? `; ${plural(steps.length - kept.length, "step")} of earlier attempts` : ""));
    this.stepTable.show(kept.slice(-this.mostSteps).reverse());
    p.moreSteps.hidden = kept.length <= this.mostSteps || this.mostSteps === MOST_STEPS;
    setText(p.moreSteps, `Show ${kept.length > MOST_STEPS ? `the last ${MOST_STEPS}` : `all ${kept.length}`} steps`);
    this.#showTimeline();
  }

  #showTimeline() {
    const { view, parts: p } = this;
    const rows = this.trace?.rows ?? rowsOfEvents(this.events, view.finished_at ?? now());
    this.timeline.show(rows);
    const ranks = secondsByRank(rows);
    const known = CATEGORIES.filter((category) => ranks.some((rank) => category in rank.seconds));
    if (this.rankTable?.categories !== known.join()) {
      const columns = [{ title: "Rank", className: "name", text: (rank) => rank.label }, ...known.map((category) => ({ title: category, className: "number", text: (rank) => seconds(rank.seconds[category] ?? 0) }))];
      this.rankTable = new LiveTable({ cards: true, place: p.ranks, caption: "Seconds by rank and kind of span", columns, key: (rank) => rank.label, empty: "No rank has worked on it yet." });
      this.rankTable.categories = known.join();
    }
    this.rankTable.show(ranks);
    p.traceLoad.hidden = !view.traced || this.trace?.isWhole === true;
    p.traceSave.hidden = !view.traced;
    if (!view.traced) setText(p.traceNote, "Steps by rank. With trace = true in [service] the service keeps layers, kernels, collectives and waits too.");
  }

  async #loadTrace() {
    const { view, signal, parts: p } = this;
    setText(p.traceNote, "Loading…");
    try {
      const text = await limitedText(await ask(jobPath(this.job, "/trace"), { signal }), MOST_TRACE_BYTES);
      if (signal.aborted) return;
      const isWhole = isFinal(view.state);
      this.trace = { isWhole, rows: text === null ? null : rowsOfTrace(JSON.parse(text)) };
      setText(p.traceNote, text === null ? `The trace has more than ${bytes(MOST_TRACE_BYTES)}: save it and open it in a trace viewer.` : isWhole ? "" : `As of ${clockTime(now())}.`);
    } catch (error) {
      if (signal.aborted) return;
      this.trace = { isWhole: isFinal(view.state), rows: null };
      setText(p.traceNote, `The spans cannot be shown: ${error.message}`);
    }
    this.#showTimeline();
  }

  async #saveTrace() {
    try {
      const blob = await (await ask(jobPath(this.job, "/trace"), { signal: this.signal })).blob();
      const address = URL.createObjectURL(blob);
      el("a", { href: address, download: `${this.job}.trace.json` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60_000);
    } catch (error) {
      if (!this.signal.aborted) setText(this.parts.traceNote, `The trace was not saved: ${error.message}`);
    }
  }

  /** Follows what is generated, from when it is first asked for. */
  async #showOutput(details) {
    if (!details.open || this.parts.output.childElementCount > 0) return;
    const samples = Array.from({ length: this.view.request.num_samples }, () => el("pre", { tabindex: "0" }));
    this.parts.output.replaceChildren(...samples.flatMap((sample, index) => [samples.length > 1 ? el("h4", {}, `Sample ${index}`) : "", sample]));
    let shown = 0;
    try {
      await follow(jobPath(this.job, "/tokens"), {
        signal: this.signal,
        onEvent: (data, name) => {
          for (const token of name === "tokens" ? data.tokens : []) {
            shown += token.text.length;
            if (shown <= MOST_CHARACTERS) samples[token.sample].append(token.text);
          }
        },
        onOpen: () => {},
        onLost: () => {}, // the stream of events says so
      });
    } catch (error) {
      this.parts.output.append(el("p", { class: "refusal" }, error.message));
      return;
    }
    if (this.signal.aborted) return;
    if (shown === 0) this.parts.output.append(el("p", { class: "note" }, "Nothing was generated."));
    if (shown > MOST_CHARACTERS) this.parts.output.append(el("p", { class: "note" }, `longprefill result ${this.job} has the rest.`));
  }
}

function grown(element, share) {
  element.style.flexGrow = String(share);
  return element;
}

/** The text of a response, null when it is longer than `most` bytes. */
async function limitedText(response, most) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let size = 0;
  let text = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return text + decoder.decode();
    size += value.byteLength;
    if (size > most) {
      await reader.cancel();
      return null;
    }
    text += decoder.decode(value, { stream: true });
  }
}
