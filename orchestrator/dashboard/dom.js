// Elements and tables. Text only ever becomes text: no markup is made of data anywhere in the dashboard.

/** An element with attributes, listeners (`onclick: f`) and children; null children are left out. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Writes only what differs, so that selections and screen readers are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Says something to screen readers. */
export function announce(text) {
  setText(byId("live"), text);
}

/** A word with a dot: never the colour alone. */
export function stateBadge(state, tone) {
  return el("span", { class: "state", "data-tone": tone }, state);
}

export function updateBadge(badge, state, tone) {
  setText(badge, state);
  setAttribute(badge, "data-tone", tone);
}

/**
 * A table that stays in place while its content changes: rows are known by a key, cells are updated, so focus stays
 * where it is. Columns: { title, className, build(item) -> element, update(element, item) } or { title, text(item) }.
 * With `cards` a row becomes a card on narrow screens; roles are spelled out because that takes them away in some
 * browsers.
 */
export class LiveTable {
  constructor({ place, caption, columns, key, empty, cards = false }) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = el("tbody", { role: "rowgroup" });
    const heads = columns.map(({ title, className, hiddenTitle }) =>
      el("th", { scope: "col", role: "columnheader", class: className }, hiddenTitle ? el("span", { class: "unseen" }, title) : title),
    );
    this.table = el(
      "table",
      { role: "table", class: cards ? "cards" : null, hidden: true },
      el("caption", { class: "unseen" }, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)),
      this.body,
    );
    this.note = el("p", { class: "note" }, "Loading…");
    this.empty = empty;
    place.replaceChildren(this.note, this.table);
  }

  show(items) {
    const wanted = new Set();
    let previous = null;
    for (const item of items) {
      const key = this.key(item);
      wanted.add(key);
      const row = this.rows.get(key) ?? this.#add(key);
      this.#update(row, item);
      const place = previous === null ? this.body.firstChild : previous.nextSibling;
      if (row.element !== place) this.body.insertBefore(row.element, place);
      previous = row.element;
    }
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    this.table.hidden = wanted.size === 0;
    this.note.hidden = wanted.size > 0;
    setText(this.note, this.empty);
  }

  /** Says why there is nothing, in place of the rows. */
  say(text) {
    this.show([]);
    setText(this.note, text);
  }

  #add(key) {
    const cells = this.columns.map(({ title, className, hiddenTitle }, index) =>
      el(index === 0 ? "th" : "td", {
        role: index === 0 ? "rowheader" : "cell",
        scope: index === 0 ? "row" : null,
        class: className,
        "data-title": hiddenTitle ? null : title,
      }),
    );
    const row = { element: el("tr", { role: "row" }, ...cells), cells, contents: cells.map(() => null) };
    this.rows.set(key, row);
    return row;
  }

  #update(row, item) {
    this.columns.forEach((column, index) => {
      const cell = row.cells[index];
      if (column.text) {
        setText(cell, column.text(item));
        return;
      }
      if (row.contents[index] === null) {
        row.contents[index] = column.build(item);
        cell.replaceChildren(row.contents[index]);
      }
      column.update?.(row.contents[index], item);
    });
  }
}
