// The page: who is looking, what is shown, and whether the service can still be heard.
//
//   Poller (every 2 s while the page is seen) -> overview.js (cluster, queue, jobs) or job.js (one job)
//   job.js also follows its job's events, and wakes the poller with each

import { askJson, jobPath, key, pause, Refusal } from "./api.js";
import { announce, byId, setText, updateBadge } from "./dom.js";
import { clockTime, now } from "./format.js";
import { JobPage } from "./job.js";
import { Overview } from "./overview.js";

const POLL_MS = 2_000;
const SHORTEST_MS = 250;
const LONGEST_MS = 10_000;

/** What is heard of the service, over both channels: "poll" and "stream". */
class Connection {
  constructor() {
    this.lost = new Map();
    this.heardAt = null;
    this.tone = "idle";
    this.word = "connecting";
  }

  heard(channel) {
    if (channel === "poll") this.heardAt = now();
    const wasLost = this.lost.size > 0;
    this.lost.delete(channel);
    if (wasLost && this.lost.size === 0) announce("Connected again");
    this.#show();
  }

  lose(channel, error, pause_ms) {
    this.lost.set(channel, { message: error.message, again_s: Math.max(1, Math.round(pause_ms / 1000)) });
    this.#show();
  }

  forget(channel) {
    this.lost.delete(channel);
    this.#show();
  }

  service(word, tone) {
    this.word = word;
    this.tone = tone;
    this.#show();
  }

  #show() {
    const banner = byId("banner");
    const [trouble] = this.lost.values();
    banner.hidden = trouble === undefined;
    if (trouble === undefined) {
      updateBadge(byId("service-state"), this.word, this.tone);
    } else {
      const since = this.heardAt === null ? "" : ` What is shown is of ${clockTime(this.heardAt)}.`;
      setText(banner, `Connection lost: ${trouble.message}. Trying again every ${trouble.again_s} s.${since}`);
      updateBadge(byId("service-state"), "connection lost", "bad");
    }
    document.body.toggleAttribute("data-stale", trouble !== undefined);
  }
}

/** The key's dialog. */
class KeyDialog {
  constructor(onChange) {
    this.dialog = byId("key-dialog");
    byId("key-button").addEventListener("click", () => this.open(null));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const given = byId("key-input").value.trim();
      if (!/^[\x21-\x7e]{1,512}$/.test(given)) {
        this.#refuse("A key has 1 to 512 printable characters and no spaces.");
        return;
      }
      key.set(given);
      this.#close(onChange);
    });
    byId("key-forget").addEventListener("click", () => {
      key.forget();
      this.#close(onChange);
    });
  }

  open(refusal) {
    byId("key-button").hidden = false;
    this.#refuse(refusal);
    byId("key-input").value = "";
    byId("key-forget").hidden = key.get() === null;
    if (!this.dialog.open) this.dialog.showModal();
    byId("key-input").focus();
  }

  #refuse(text) {
    byId("key-error").hidden = text === null;
    setText(byId("key-error"), text ?? "");
  }

  #close(onChange) {
    byId("key-input").value = "";
    this.dialog.close();
    onChange();
  }
}

/** Asks before a job is cancelled; focus comes back to where it was. */
class CancelDialog {
  constructor(onCancelled) {
    this.dialog = byId("cancel-dialog");
    this.job = null;
    byId("cancel-no").addEventListener("click", () => this.dialog.close());
    byId("cancel-yes").addEventListener("click", async () => {
      byId("cancel-yes").disabled = true;
      try {
        const view = await askJson(jobPath(this.job), { method: "DELETE" });
        this.dialog.close();
        announce(`Job ${this.job} is ${view.state}`);
        onCancelled();
      } catch (error) {
        setText(byId("cancel-error"), `It was not cancelled: ${error.message}`);
        byId("cancel-error").hidden = false;
      } finally {
        byId("cancel-yes").disabled = false;
      }
    });
  }

  open(job) {
    this.job = job;
    byId("cancel-error").hidden = true;
    setText(byId("cancel-job"), job);
    this.dialog.showModal();
  }
}

class Page {
  constructor() {
    this.connection = new Connection();
    this.keyDialog = new KeyDialog(() => this.begin());
    const cancelDialog = new CancelDialog(() => this.wake());
    const wake = () => this.wake();
    this.overview = new Overview({ connection: this.connection, wake, cancel: (job) => cancelDialog.open(job) });
    this.jobPage = new JobPage({ connection: this.connection, wake, cancel: (job) => cancelDialog.open(job) });
    this.caller = null;
    this.running = new AbortController();
    this.sleeping = new AbortController();
    this.lastJob = null;
    window.addEventListener("hashchange", () => this.begin());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.wake(); });
    byId("find").addEventListener("submit", (event) => {
      event.preventDefault();
      const job = byId("find-job").value.trim();
      if (job !== "") location.hash = `#/jobs/${encodeURIComponent(job)}`;
    });
  }

  /** Begins anew: another view, or another key. */
  begin() {
    this.running.abort();
    this.running = new AbortController();
    this.connection.forget("stream");
    const job = shownJob();
    byId("overview").hidden = job !== null;
    byId("job").hidden = job === null;
    this.#moveFocus(job);
    this.#run(job, this.running.signal);
  }

  /** Asks at once for what is new. */
  wake() {
    this.sleeping.abort();
  }

  async #run(job, signal) {
    let pause_ms = POLL_MS;
    let isOpen = false;
    this.caller = null;
    while (!signal.aborted) {
      try {
        if (!document.hidden || !isOpen) {
          if (this.caller === null && !(await this.#findCaller(signal))) return;
          if (!isOpen && job !== null) this.jobPage.open(job, this.caller, signal);
          isOpen = true;
          await this.overview.refreshService(this.caller, signal);
          await (job === null ? this.overview.refresh(this.caller, signal) : this.jobPage.refresh(signal));
          this.connection.heard("poll");
          setText(byId("updated"), `updated ${new Date().toLocaleTimeString("en-GB")}`);
          pause_ms = POLL_MS;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refusal && error.status === 401) return this.keyDialog.open("This key is not known to the service.");
        pause_ms = Math.min(2 * pause_ms, LONGEST_MS);
        this.connection.lose("poll", error, pause_ms);
      }
      await pause(SHORTEST_MS, signal);
      this.sleeping = new AbortController();
      await pause(pause_ms - SHORTEST_MS, AbortSignal.any([signal, this.sleeping.signal]));
    }
  }

  /** Finds out who is looking, without a request that would be refused; false when a key is needed first. */
  async #findCaller(signal) {
    let answer;
    try {
      answer = await askJson("/readyz", { signal });
    } catch (error) {
      if (!(error instanceof Refusal) || error.status !== 503) throw error;
      answer = error.body ?? {};
    }
    if (signal.aborted) return false;
    byId("key-button").hidden = key.get() === null && "caller" in answer;
    if ("caller" in answer) {
      this.caller = answer.caller;
      return true;
    }
    this.keyDialog.open(key.get() === null ? null : "This key is not known to the service.");
    return false;
  }

  #moveFocus(job) {
    if (job === this.lastJob) return;
    const before = this.lastJob;
    this.lastJob = job;
    document.title = job === null ? "longprefill" : `${job} – longprefill`;
    if (job !== null) byId("main").focus();
    else if (before !== null && !this.overview.focusJob(before)) byId("main").focus();
    window.scrollTo(0, 0);
  }
}

function shownJob() {
  const found = /^#\/jobs\/(.+)$/.exec(location.hash);
  try {
    return found === null ? null : decodeURIComponent(found[1]);
  } catch {
    return found[1];
  }
}

new Page().begin();
