// What a chart does: switches, read-outs, zoom by dragging, keys, saving. How it looks is in Drawing.
"use strict";

const groups = new Map(); // charts that share their crosshair and their zoom

class Chart extends Drawing {
  constructor(figure, spec) {
    super();
    Object.assign(this, { figure, spec, series: spec.series, zoom: null, cursor: null });
    this.hidden = new Set();
    this.log = { x: Boolean(spec.x.log), y: Boolean(spec.y.log) };
    this.build();
    if (spec.group) groups.set(spec.group, [...(groups.get(spec.group) ?? []), this]);
    this.series.forEach((s, i) => s.hidden && this.hidden.add(i));
    this.draw();
    new ResizeObserver(() => this.room() !== this.width && this.draw()).observe(this.stage);
  }

  build() {
    const bar = make(this.figure, "div", { class: "tools" });
    const title = this.figure.querySelector("h3");
    title ? title.after(bar) : this.figure.prepend(bar);
    this.legend = make(bar, "div", { class: "legend" });
    if (this.spec.choices) this.chooser(bar);
    const tools = make(bar, "div", { class: "switches" });
    for (const axis of ["y", "x"]) if (this.spec[axis].toggle) this.logSwitch(tools, axis);
    this.reset = this.button(tools, "reset", "Show all again (Escape)", () => this.zoomTo(null));
    this.reset.hidden = true;
    this.button(tools, "CSV", "Save the numbers of this chart", () => this.save());
    const label = `${this.spec.label}. Arrow keys read values, plus and minus zoom, Escape shows all.`;
    this.stage = make(this.figure, "div", { class: "stage", tabindex: 0, role: "group", "aria-label": label });
    this.stage.setAttribute("aria-roledescription", "chart");
    bar.after(this.stage);
    this.svg = make(this.stage, "svg", { "aria-hidden": "true", preserveAspectRatio: "xMidYMid meet" });
    this.readout = make(this.stage, "div", { class: "readout", hidden: "" });
    this.spoken = make(this.stage, "div", { class: "unseen", "aria-live": "polite" });
    this.listen();
  }

  button(parent, text, title, act) {
    const node = make(parent, "button", { type: "button", title }, text);
    node.addEventListener("click", act);
    return node;
  }

  logSwitch(parent, axis) {
    const node = this.button(parent, `log ${axis}`, `Logarithmic ${axis} axis`, () => {
      this.log[axis] = !this.log[axis];
      if (axis === "x" || this.zoom?.y) this.zoom = null; // what is shown may hold numbers that have no logarithm
      node.setAttribute("aria-pressed", this.log[axis]);
      this.draw();
    });
    node.setAttribute("aria-pressed", this.log[axis]);
    node.dataset.log = axis;
  }

  chooser(bar) {
    const select = make(bar, "select", { "aria-label": "What is drawn" });
    this.spec.choices.forEach((c, i) => make(select, "option", { value: i }, c.name));
    select.addEventListener("change", () => {
      const chosen = this.spec.choices[+select.value];
      Object.assign(this, { series: chosen.series, zoom: null, cursor: null });
      this.spec.x = { ...this.spec.x, ...chosen.x };
      this.draw();
    });
  }

  // ------------------------------------------------------------------------------------------------ reading

  // What is at a place of the stage: rows of the read-out, and where to put it.
  near(px, py) {
    return this.spec.hover === "point" ? this.nearPoint(px, py) : this.nearX(this.x.back(px), px);
  }

  nearX(value, px = null) {
    const rows = [];
    let at = value;
    for (const s of this.visible()) {
      if (s.kind === "line" || s.kind === "points") {
        const i = nearest(s.x, value);
        if (i === null || !this.within(s, i, value)) continue;
        rows.push({ s, x: s.x[i], y: s.y[i], low: s.low?.[i], high: s.high?.[i], text: s.text?.[i] });
        if (rows.length === 1) at = s.x[i];
      } else if (s.kind === "bars") {
        const i = s.edges.findLastIndex((e) => e <= value);
        if (i < 0 || i >= s.y.length) continue;
        at = `${show(s.edges[i])} to ${show(s.edges[i + 1])}`;
        rows.push({ s, x: (s.edges[i] + s.edges[i + 1]) / 2, y: s.y[i], level: s.y[i] + (s.base?.[i] ?? 0) });
      } else if (s.kind === "rug" && px !== null) {
        const i = nearest(s.x, value);
        const near = i !== null && Math.abs(this.x.at(s.x[i]) - px) < 6;
        if (near) rows.push({ s, x: s.x[i], y: s.x[i], text: s.text[i], rug: true });
      }
    }
    return rows.length ? { at, rows, px: this.x.at(rows[0].x) } : null;
  }

  // Whether a value belongs to a series: a point must be near, a curve must not have ended before.
  within(s, i, value) {
    const ended = s.kind === "points" || i === 0 || i === s.x.length - 1;
    return !ended || Math.abs(this.x.at(s.x[i]) - this.x.at(value)) <= 12 || s.x.length === 1;
  }

  nearPoint(px, py) {
    let best = null;
    for (const s of this.visible()) {
      const xs = s.kind === "box" ? s.box : s.x;
      if (!xs || s.kind === "line") continue;
      xs.forEach((x, i) => {
        const y = s.kind === "box" ? s.row : s.y[i];
        if (!finite(x) || !finite(y)) return;
        const far = Math.hypot(this.x.at(x) - px, (this.y.at(y) - py) * (this.spec.y.categories ? 2 : 1));
        if (!best || far < best.far) best = { far, s, i, x, y };
      });
    }
    return best && best.far < 60 ? this.pointRow(best.s, best.i) : null;
  }

  pointRow(s, i) {
    if (s.kind === "box") {
      const names = ["lower whisker", "lower quartile", "median", "upper quartile", "upper whisker"];
      const rows = s.box.map((v, k) => ({ s, x: v, y: s.row, plain: v, text: names[k], mute: k !== i }));
      return { at: s.name, rows, px: this.x.at(s.box[i]), index: [s, i] };
    }
    const names = this.spec.y.categories;
    const row = { s, x: s.x[i], y: s.y[i], low: s.low?.[i], high: s.high?.[i], text: s.text?.[i] };
    const title = names ? names[Math.round(s.y[i])] : s.x[i];
    if (names) Object.assign(row, { plain: s.x[i], low: s.xlow?.[i], high: s.xhigh?.[i] });
    return { at: title, rows: [row], px: this.x.at(s.x[i]), index: [s, i] };
  }

  point(found, quiet = false) {
    this.over.replaceChildren();
    this.cursor = found;
    this.readout.hidden = !found || Boolean(found.linked);
    if (!found) return;
    const { top, bottom } = this.area;
    const hair = { class: "hair", x1: found.px, x2: found.px, y1: top, y2: bottom };
    if (this.spec.hover !== "point") make(this.over, "line", hair);
    for (const row of found.rows) {
      const y = row.rug ? bottom - 5 : this.clampY(row.level ?? row.y);
      if (row.mute || !finite(y) || y < top - 8 || y > bottom + 8) continue;
      make(this.over, "circle", { class: `ring ink-${row.s.color % INK}`, cx: this.x.at(row.x), cy: y, r: 4.5 });
    }
    if (found.linked) return this.label(found);
    this.write(found);
    if (!quiet && this.spec.group && this.spec.hover !== "point") this.tell(found);
  }

  // The values beside their points, in a chart that follows another one.
  label(found) {
    const end = found.px > this.area.right - 80;
    for (const row of found.rows.slice(0, 4)) {
      const y = Math.max(this.area.top + 8, this.clampY(row.level ?? row.y) - 7);
      const place = { x: found.px + (end ? -8 : 8), y, "text-anchor": end ? "end" : "start" };
      make(this.over, "text", { class: "linked", ...place }, show(row.y));
    }
  }

  tell(found) {
    for (const other of groups.get(this.spec.group)) {
      if (other === this || other.spec.hover === "point") continue;
      const there = other.nearX(found.rows[0].x);
      other.point(there && { ...there, linked: true }, true);
    }
  }

  write(found) {
    const box = this.readout;
    box.replaceChildren();
    const head = typeof found.at === "string" ? found.at : `${this.spec.x.label} ${show(found.at)}`;
    make(box, "strong", {}, head);
    for (const row of found.rows) {
      const line = make(box, "div", { class: `ink-${row.s.color % INK}` });
      make(line, "i");
      const name = row.s.kind === "box" ? row.text : row.s.name;
      const value = row.rug ? show(row.x) : show(row.plain ?? row.y);
      make(line, "span", {}, name ? `${name} ` : "");
      make(line, "b", {}, value);
      if (finite(row.low) && finite(row.high) && row.low !== row.high) {
        make(line, "small", {}, ` ${show(row.low)} to ${show(row.high)}`);
      }
      if (row.text && row.s.kind !== "box") make(line, "small", {}, ` ${row.text}`);
    }
    const wide = box.offsetWidth;
    const at = (found.px * this.stage.clientWidth) / this.width;
    const left = at + 14 + wide > this.stage.clientWidth ? at - wide - 14 : at + 14;
    box.style.left = `${Math.max(left, 0)}px`;
    // of a point the read-out stands in the other half, so that it does not hide what is around it
    const high = this.spec.hover === "point" && this.clampY(found.rows[0].y) < (this.area.top + this.area.bottom) / 2;
    box.style.top = high ? "auto" : "0.4rem";
    box.style.bottom = high ? "3rem" : "auto";
  }

  // ------------------------------------------------------------------------------------------------ pointer and keys

  listen() {
    const place = (e) => {
      const at = this.stage.getBoundingClientRect();
      return [((e.clientX - at.left) * this.width) / at.width, ((e.clientY - at.top) * this.width) / at.width];
    };
    let from = null;
    this.stage.addEventListener("pointerdown", (e) => {
      if (e.button) return;
      from = place(e);
      this.stage.setPointerCapture(e.pointerId);
    });
    this.stage.addEventListener("pointermove", (e) => {
      const [x, y] = place(e);
      this.point(this.near(x, y));
      if (from && Math.abs(x - from[0]) > 6) this.drawFrame(from, [x, y]);
    });
    this.stage.addEventListener("pointerup", (e) => {
      const [a, b] = [from, place(e)];
      from = null;
      if (a && Math.abs(a[0] - b[0]) > 12) this.zoomBetween(a, b);
    });
    const leave = () => {
      from = null;
      for (const chart of groups.get(this.spec.group) ?? [this]) chart.point(null, true);
    };
    this.stage.addEventListener("pointercancel", leave);
    this.stage.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && leave());
    this.stage.addEventListener("dblclick", () => this.zoomTo(null));
    this.stage.addEventListener("blur", leave);
    this.stage.addEventListener("keydown", (e) => this.key(e));
  }

  drawFrame(a, b) {
    const { top, bottom } = this.area;
    const free = this.spec.zoom === "xy";
    const [y, tall] = free ? [Math.min(a[1], b[1]), Math.abs(a[1] - b[1])] : [top, bottom - top];
    make(this.over, "rect", { class: "frame", x: Math.min(a[0], b[0]), y, width: Math.abs(a[0] - b[0]), height: tall });
  }

  zoomBetween(a, b) {
    const { left, right, top, bottom } = this.area;
    const within = (v, low, high) => Math.max(low, Math.min(high, v));
    const xs = [a[0], b[0]].map((p) => this.x.back(within(p, left, right))).sort((p, q) => p - q);
    const ys = [a[1], b[1]].map((p) => this.y.back(within(p, top, bottom))).sort((p, q) => p - q);
    this.zoomTo({ x: xs, y: this.spec.zoom === "xy" && Math.abs(a[1] - b[1]) > 12 ? ys : null });
  }

  zoomTo(zoom) {
    const finest = zoom && 1e-9 * Math.max(...zoom.x.map(Math.abs)); // closer than this, numbers are not told apart
    if (zoom && !(zoom.x[1] - zoom.x[0] > finest)) return;
    for (const chart of this.spec.group ? groups.get(this.spec.group) : [this]) {
      chart.zoom = zoom && { x: zoom.x, y: chart === this ? zoom.y : null };
      chart.cursor = null;
      chart.draw();
    }
  }

  key(e) {
    const turn = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[e.key];
    if (turn) this.walk(turn);
    else if (e.key === "Escape") this.zoomTo(null);
    else if (e.key === "+" || e.key === "=" || e.key === "-") this.zoomBy(e.key === "-" ? 2 : 0.5);
    else return;
    e.preventDefault();
  }

  zoomBy(factor) {
    const { left, right } = this.area;
    const middle = this.cursor?.px ?? (left + right) / 2;
    this.zoomTo({ x: [left, right].map((p) => this.x.back(middle + (p - middle) * factor)), y: null });
  }

  walk(turn) {
    const not = this.spec.hover === "point" ? ["rug", "line"] : ["rug"];
    const main = this.visible().find((s) => !not.includes(s.kind));
    if (!main) return;
    const middle = (_, i) => (main.edges[i] + main.edges[i + 1]) / 2;
    const xs = { bars: () => main.y.map(middle), box: () => main.box }[main.kind]?.() ?? main.x;
    const order = xs.map((_, i) => i).sort((i, j) => xs[i] - xs[j]);
    const old = this.cursor ? order.indexOf(nearest(xs, this.cursor.rows[0].x)) : -1;
    const next = order[Math.max(0, Math.min(order.length - 1, old + turn))];
    this.point(this.spec.hover === "point" ? this.pointRow(main, next) : this.nearX(xs[next]));
    this.spoken.textContent = this.readout.textContent;
  }

  save() {
    const names = ["x", "y", "low", "high", "xlow", "xhigh", "base", "text"];
    const lines = [["series", this.spec.x.label, this.spec.y.label || "row", ...names.slice(2)]];
    for (const s of this.series) {
      const columns = s.kind === "box" ? { x: s.box, y: s.box.map(() => s.row) } : { ...s, x: s.x ?? s.edges };
      columns.x.forEach((_, i) => lines.push([s.name, ...names.map((name) => columns[name]?.[i])]));
    }
    // a text that begins as a formula does is not one
    const plain = (c) => (typeof c === "string" && /^[=+@-]/.test(c) ? `'${c}` : String(c ?? ""));
    const quoted = lines.map((cells) => cells.map((c) => `"${plain(c).replaceAll('"', '""')}"`).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([quoted.join("\n")], { type: "text/csv" }));
    link.download = `${this.spec.id}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  }
}
