// Spans over time on a canvas: a row for the controller and each rank, a lane for each kind of span.

import { el, setText } from "./dom.js";
import { seconds } from "./format.js";

const LANE = 13;
const LANE_GAP = 2;
const ROW_GAP = 10;
const AXIS = 20;
const MOST_HEIGHT = 8000; // what a canvas of every browser can have at twice the pixels
const ZOOM = 1.6;
const SHORTEST_S = 1e-5;
const HELP = "Arrow keys move, plus and minus zoom, 0 shows all.";

export class Timeline {
  constructor(place) {
    this.rows = [];
    this.canvas = el("canvas", { tabindex: "0", role: "img", onkeydown: (event) => this.#key(event), onpointermove: (event) => this.#point(event), onpointerdown: (event) => this.#grab(event), onpointerup: () => { this.grabbed = null; } });
    this.box = el("div", { class: "timeline" }, this.canvas);
    this.words = el("p", { class: "muted timeline-words" }, HELP);
    this.left = el("p", { class: "muted", hidden: true });
    this.legend = el("ul", { class: "legend" });
    const button = (text, label, act) => el("button", { type: "button", class: "quiet", "aria-label": label, onclick: act }, text);
    const tools = el(
      "div", { class: "tools" },
      button("−", "Zoom out", () => this.#zoom(1 / ZOOM)),
      button("+", "Zoom in", () => this.#zoom(ZOOM)),
      button("◀", "Earlier", () => this.#move(-0.25)),
      button("▶", "Later", () => this.#move(0.25)),
      button("All", "Show all", () => this.#showAll()),
      this.legend,
    );
    place.replaceChildren(tools, this.box, this.words, this.left);
    this.grabbed = null;
    this.isFollowing = true;
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.box);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
  }

  close() {
    this.resized.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
  }

  /** Shows rows as steps.js makes them; the view stays where it was unless it showed everything. */
  show(rows) {
    this.rows = fitting(rows);
    this.end = Math.max(SHORTEST_S, ...rows.flatMap((row) => row.lanes.map((lane) => lane.spans.reduce((end, span) => Math.max(end, span.end), 0))));
    if (this.isFollowing) [this.from, this.to] = [0, this.end];
    const categories = [...new Set(rows.flatMap((row) => row.lanes.map((lane) => lane.category)))];
    if (this.legend.dataset.shown !== categories.join()) {
      this.legend.dataset.shown = categories.join();
      this.legend.replaceChildren(...categories.map((category) => el("li", { "data-category": category }, category)));
    }
    const left = rows.length - this.rows.length;
    const number = rows.reduce((sum, row) => sum + row.lanes.reduce((own, lane) => own + lane.spans.length, 0), 0);
    this.canvas.setAttribute("aria-label", `Timeline of ${seconds(this.end)}: ${rows.length} rows, ${number} spans${left > 0 ? `, the last ${left} rows not drawn` : ""}. ${HELP} The table below has the sums.`);
    this.left.hidden = left === 0;
    setText(this.left, `${left} of ${rows.length} rows are not drawn: the table and the saved trace have them.`);
    this.draw();
  }

  draw() {
    const width = this.box.clientWidth;
    if (width === 0 || this.rows.length === 0) return;
    const scale = window.devicePixelRatio || 1;
    const height = AXIS + this.rows.reduce((sum, row) => sum + rowHeight(row), 0);
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    this.gutter = Math.min(width / 3, 12 + Math.max(...this.rows.map((row) => context.measureText(row.label).width)));
    this.#axis(context, width, height, color);
    this.lanes = [];
    let top = AXIS;
    for (const row of this.rows) {
      context.fillStyle = color("--text");
      context.fillText(row.label, 0, top + (rowHeight(row) - ROW_GAP) / 2, this.gutter - 8);
      for (const lane of row.lanes) {
        context.fillStyle = color(`--cat-${lane.category}`) || color("--muted");
        this.#lane(context, lane, top, width, color("--on-category"));
        this.lanes.push({ top, lane, label: row.label });
        top += LANE + LANE_GAP;
      }
      top += ROW_GAP;
    }
  }

  #lane(context, lane, top, width, ink) {
    const fill = context.fillStyle;
    let drawnTo = -1;
    for (const span of lane.spans) {
      if (span.end < this.from || span.start > this.to) continue;
      const left = Math.max(this.gutter, this.#x(span.start, width));
      const right = Math.min(width, Math.max(this.#x(span.end, width), left + 1));
      if (right - drawnTo < 0.5) continue; // it would lie behind what is drawn
      context.fillRect(left, top, Math.max(right - left - (right - left > 3 ? 1 : 0), 1), LANE);
      drawnTo = right;
      if (right - left > 8 * span.name.length + 6) {
        context.fillStyle = ink;
        context.fillText(span.name, left + 4, top + LANE / 2 + 0.5);
        context.fillStyle = fill;
      }
    }
  }

  #axis(context, width, height, color) {
    const wanted = (this.to - this.from) / Math.max(2, (width - this.gutter) / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const distance = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= wanted);
    for (let at = Math.ceil(this.from / distance) * distance; at <= this.to; at += distance) {
      const x = Math.round(this.#x(at, width)) + 0.5;
      context.fillStyle = color("--line");
      context.fillRect(x, AXIS - 4, 1, height - AXIS + 4);
      context.fillStyle = color("--muted");
      const words = Math.abs(at) < distance / 2 ? "0" : distance < 1e-3 ? `${(at * 1e3).toFixed(2)} ms` : distance < 0.1 ? `${at.toFixed(distance < 0.01 ? 3 : 2)} s` : `${Number(at.toFixed(1))} s`;
      if (x + context.measureText(words).width < width) context.fillText(words, x + 3, 8);
    }
  }

  #x(at, width) {
    return this.gutter + ((at - this.from) / (this.to - this.from)) * (width - this.gutter);
  }

  #zoom(factor, around = (this.from + this.to) / 2) {
    const length = Math.min(this.end, Math.max((this.to - this.from) / factor, SHORTEST_S));
    const share = (around - this.from) / (this.to - this.from);
    this.#look(around - share * length, length);
  }

  #move(share) {
    const length = this.to - this.from;
    this.#look(this.from + share * length, length);
  }

  #look(from, length) {
    this.from = Math.max(0, Math.min(from, this.end - length));
    this.to = this.from + length;
    this.isFollowing = length >= this.end;
    setText(this.words, `${seconds(this.from)} to ${seconds(this.to)}`);
    this.draw();
  }

  #showAll() {
    this.#look(0, this.end);
  }

  #key(event) {
    const act = {
      ArrowLeft: () => this.#move(-0.1),
      ArrowRight: () => this.#move(0.1),
      "+": () => this.#zoom(ZOOM),
      "=": () => this.#zoom(ZOOM),
      "-": () => this.#zoom(1 / ZOOM),
      0: () => this.#showAll(),
    }[event.key];
    if (act === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  #grab(event) {
    if (event.pointerType === "mouse") this.grabbed = { x: event.offsetX, from: this.from };
  }

  #point(event) {
    const width = this.box.clientWidth;
    const perPixel = (this.to - this.from) / (width - this.gutter);
    if (this.grabbed !== null && event.buttons === 1) {
      this.#look(this.grabbed.from - (event.offsetX - this.grabbed.x) * perPixel, this.to - this.from);
      return;
    }
    const at = this.from + (event.offsetX - this.gutter) * perPixel;
    const found = this.lanes?.find(({ top }) => event.offsetY >= top && event.offsetY < top + LANE);
    const span = found?.lane.spans.findLast((one) => one.start <= at + perPixel && one.end >= at - perPixel);
    setText(this.words, span === undefined ? HELP : `${found.label}: ${span.name}${span.layer === null ? "" : `, layer ${span.layer}`}, ${seconds(span.end - span.start)} from ${seconds(span.start)}`);
  }
}

/** The rows that there is room for. */
function fitting(rows) {
  let height = AXIS;
  return rows.filter((row) => (height += rowHeight(row)) <= MOST_HEIGHT);
}

function rowHeight(row) {
  return row.lanes.length * (LANE + LANE_GAP) + ROW_GAP;
}
