// What the service is doing: figures, jobs, groups and workers, nodes.

import { askJson, askText } from "./api.js";
import { byId, el, LiveTable, setAttribute, setText, stateBadge, updateBadge } from "./dom.js";
import { bytes, count, isFinal, jobState, now, percent, plural, roughly, seconds } from "./format.js";
import { parse, Rate, value } from "./metrics.js";

const PAGE_JOBS = 50;
const MOST_JOBS = 1000;
const FILTERS = [
  ["all", []],
  ["active", ["queued", "prefilling", "handing_off", "generating"]],
  ["queued", ["queued"]],
  ["running", ["prefilling", "handing_off", "generating"]],
  ["done", ["done"]],
  ["failed", ["failed"]],
  ["cancelled", ["cancelled"]],
];
const GROUP_TONES = { ready: "good", starting: "busy", waiting: "warn", failed: "bad" };

export class Overview {
  constructor({ connection, wake, cancel }) {
    this.connection = connection;
    this.filter = "all";
    this.limit = PAGE_JOBS;
    this.rate = new Rate();
    this.#makeFilters(wake);
    this.jobs = new LiveTable({ cards: true, place: byId("jobs"), caption: "Jobs, newest first", columns: jobColumns(cancel), key: (job) => job.id, empty: "" });
    this.groups = new LiveTable({ cards: true, place: byId("groups"), caption: "Prefill groups and decode workers", columns: GROUP_COLUMNS, key: (group) => group.name, empty: "No groups are configured." });
    this.nodes = new LiveTable({ cards: true, place: byId("nodes"), caption: "Nodes of the cluster", columns: NODE_COLUMNS, key: (node) => `${node.name} ${node.id ?? ""}`, empty: "Ray reports no nodes." });
    byId("more").addEventListener("click", () => {
      this.limit = Math.min(this.limit + PAGE_JOBS, MOST_JOBS);
      wake();
    });
    this.cluster = null;
  }

  /** The header; `refresh` shows the rest of what is learnt here. */
  async refreshService(caller, signal) {
    this.cluster = caller.operator ? await askJson("/v1/cluster", { signal }) : null;
    if (this.cluster === null) {
      setText(byId("model"), caller.tenant);
      this.connection.service("connected", "good");
      return;
    }
    setText(byId("model"), this.cluster.model);
    this.connection.service(...serviceState(this.cluster));
  }

  async refresh(caller, signal) {
    const filter = this.filter;
    const query = new URLSearchParams({ limit: String(this.limit) });
    for (const state of FILTERS.find(([name]) => name === filter)[1]) query.append("state", state);
    const [page, metrics] = await Promise.all([
      askJson(`/v1/prefill/jobs?${query}`, { signal }),
      caller.operator ? askText("/metrics", { signal }) : null,
    ]);
    if (filter === this.filter) this.#showJobs(page);
    const isOperator = this.cluster !== null;
    byId("groups-section").hidden = byId("nodes-section").hidden = byId("figures-section").hidden = !isOperator;
    if (!isOperator) return;
    this.groups.show(this.cluster.groups);
    this.nodes.show(this.cluster.nodes);
    this.#showFigures(parse(metrics));
  }

  /** Puts the focus on a job's link, if it is in the list. */
  focusJob(job) {
    const link = this.jobs.rows.get(job)?.element.querySelector("a");
    link?.focus();
    return link !== undefined;
  }

  #makeFilters(wake) {
    const buttons = FILTERS.map(([name]) =>
      el("button", {
        type: "button",
        "aria-pressed": name === this.filter ? "true" : "false",
        onclick: (event) => {
          this.filter = name;
          this.limit = PAGE_JOBS;
          for (const button of buttons) setAttribute(button, "aria-pressed", String(button === event.currentTarget));
          this.jobs.say("Loading…");
          wake();
        },
      }, name),
    );
    byId("filters").replaceChildren(...buttons);
  }

  #showJobs(page) {
    this.jobs.empty = this.filter === "all"
      ? "No jobs yet. longprefill submit FILE hands one in."
      : `No job is ${this.filter} now.`;
    this.jobs.show(page.data);
    byId("more").hidden = !page.has_more || this.limit === MOST_JOBS;
  }

  #showFigures(samples) {
    const stage = (name) => value(samples, "longprefill_stage_jobs", { stage: name }) ?? 0;
    const ended = (outcome) => value(samples, "longprefill_jobs_total", { outcome }) ?? 0;
    const prefilled = value(samples, "longprefill_tokens_total", { kind: "prefilled" }) ?? 0;
    const firsts = value(samples, "longprefill_ttft_seconds_count") ?? 0;
    const rate = this.rate.add(now(), prefilled);
    const groups = this.cluster.groups.filter((group) => group.role === "prefill");
    const held = groups.reduce((sum, group) => sum + group.used_tokens, 0);
    const room = groups.reduce((sum, group) => sum + group.max_tokens, 0);
    showFigures(byId("figures"), [
      ["Queued", count(stage("queued")), ""],
      ["Prefilling", count(stage("prefilling")), ""],
      ["Handing off", count(stage("handing_off")), ""],
      ["Generating", count(stage("generating")), ""],
      ["Prefill", rate === null ? "–" : `${count(rate)} tokens/s`, `${count(prefilled)} tokens since start`],
      ["Mean time to first token", firsts === 0 ? "–" : seconds(value(samples, "longprefill_ttft_seconds_sum") / firsts), `of ${plural(firsts, "job")}`],
      ["Prefill caches", percent(held, room), `${count(held)} of ${count(room)} tokens`],
      ["Ended since start", count(ended("done") + ended("failed") + ended("cancelled")), `${count(ended("failed"))} failed, ${count(ended("cancelled"))} cancelled`],
    ]);
  }
}

/** Figures in place: [title, figure, what it is of]. */
export function showFigures(place, figures) {
  if (place.children.length !== figures.length) {
    place.replaceChildren(...figures.map(() => el("div", {}, el("dt"), el("dd", { class: "figure" }), el("dd", { class: "muted" }))));
  }
  figures.forEach((texts, index) => texts.forEach((text, part) => setText(place.children[index].children[part], text)));
}

function serviceState(cluster) {
  if (cluster.is_draining) return ["draining", "warn"];
  for (const role of ["prefill", "decode"]) {
    const own = cluster.groups.filter((group) => group.role === role);
    if (own.length > 0 && !own.some((group) => group.state === "ready")) return [`no ${role} ${role === "prefill" ? "group" : "worker"} ready`, "warn"];
  }
  const down = cluster.groups.filter((group) => group.state !== "ready").length;
  return down === 0 ? ["ready", "good"] : [`ready, ${down} of ${cluster.groups.length} groups down`, "warn"];
}

function badgeOf(item) {
  const badge = stateBadge(...jobState(item.state));
  return el("div", {}, badge, el("span", { class: "reason" }));
}

function updateBadgeOf(cell, item) {
  updateBadge(cell.firstChild, ...jobState(item.state));
  setText(cell.lastChild, item.reason ?? "");
}

function jobColumns(cancel) {
  return [
    { title: "Job", className: "id", build: (job) => el("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, job.id) },
    { title: "Tenant", className: "name", text: (job) => job.tenant },
    { title: "State", className: "half", build: badgeOf, update: updateBadgeOf },
    {
      title: "Prefill",
      className: "wide",
      build: (job) => el("div", { class: "progress" }, el("progress", { "aria-label": `Prefill of ${job.id}` }), el("span")),
      update(cell, job) {
        const [bar, words] = cell.children;
        setAttribute(bar, "max", job.prompt_tokens);
        setAttribute(bar, "value", job.position);
        setText(words, `${count(job.position)} of ${plural(job.prompt_tokens, "token")}, ${plural(job.num_steps, "step")}`);
      },
    },
    { title: "Generated", className: "number", text: (job) => count(job.generated_tokens) },
    { title: "Where", className: "name half", text: (job) => [job.group, job.decode_worker].filter(Boolean).join(" → ") || "–" },
    { title: "Time", className: "number", text: (job) => roughly((job.finished_at ?? now()) - job.created_at) },
    { title: "Expected", className: "half", text: expected },
    {
      title: "Actions",
      hiddenTitle: true,
      className: "action",
      build: (job) => el("button", { type: "button", class: "quiet", "aria-label": `Cancel ${job.id}`, onclick: () => cancel(job.id) }, "Cancel"),
      update: (button, job) => { button.hidden = isFinal(job.state); },
    },
  ];
}

/** What the scheduler expects of a job, in words. */
export function expected(job) {
  if (job.estimate === null || isFinal(job.state)) return "–";
  const { start_s, finish_s, reason } = job.estimate;
  const parts = [];
  if (start_s !== null && start_s > 0) parts.push(`starts in ${roughly(start_s)}`);
  if (finish_s !== null) parts.push(`prefilled in ${roughly(finish_s)}`);
  return [parts.join(", "), reason === job.reason ? "" : reason].filter(Boolean).join("; ") || "–";
}

const GROUP_COLUMNS = [
  { title: "Group", className: "name", text: (group) => group.name },
  { title: "Role", text: (group) => group.role },
  {
    title: "State",
    className: "half",
    build: () => el("div", {}, stateBadge("", "idle"), el("span", { class: "reason" })),
    update(cell, group) {
      updateBadge(cell.firstChild, group.state, GROUP_TONES[group.state] ?? "idle");
      setText(cell.lastChild, group.reason ?? "");
    },
  },
  { title: "Mesh", className: "name", text: (group) => group.mesh },
  { title: "Nodes", text: (group) => group.nodes.join(", ") || "–" },
  {
    title: "Caches",
    className: "wide",
    build: (group) => el("div", { class: "progress" }, el("progress", { "aria-label": `Caches of ${group.name}` }), el("span")),
    update(cell, group) {
      const [bar, words] = cell.children;
      setAttribute(bar, "max", Math.max(group.max_tokens, 1));
      setAttribute(bar, "value", group.used_tokens);
      setText(words, `${count(group.used_tokens)} of ${plural(group.max_tokens, "token")}`);
    },
  },
  {
    title: "Jobs",
    className: "id half",
    build: () => el("div"),
    update(cell, group) {
      if (cell.dataset.jobs === group.jobs.join(" ")) return;
      cell.dataset.jobs = group.jobs.join(" ");
      const links = group.jobs.slice(0, 3).map((job) => el("a", { href: `#/jobs/${encodeURIComponent(job)}` }, job));
      cell.replaceChildren(...(links.length === 0 ? ["–"] : links), group.jobs.length > 3 ? ` and ${group.jobs.length - 3} more` : "");
    },
  },
  { title: "Memory", className: "number", text: (group) => bytes(group.rss_bytes) },
  { title: "Heard", className: "number", text: (group) => `${roughly(group.heartbeat_age_s)} ago` },
  { title: "Restarts", className: "number", text: (group) => count(group.num_restarts) },
];

const NODE_COLUMNS = [
  { title: "Node", className: "name", text: (node) => String(node.name ?? "–") },
  {
    title: "State",
    build: () => stateBadge("", "idle"),
    update(badge, node) {
      const isAlive = node.is_alive !== false;
      updateBadge(badge, isAlive ? "alive" : "gone", isAlive ? "good" : "bad");
    },
  },
  { title: "Resources", className: "half", text: (node) => Object.entries(node.resources ?? {}).map(([name, amount]) => resource(name, amount)).join(", ") || "–" },
];

function resource(name, amount) {
  return /memory/.test(name) ? `${name} ${bytes(Number(amount))}` : `${name} ${Number(amount)}`;
}
