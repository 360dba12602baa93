// Charts of the report: SVG drawn from plain data, with read-outs, zoom and keys. No dependencies, nothing is fetched.
//
// A chart is an object: x and y axes {label, log, toggle, floor, categories, low, high}, a list of series, and marks.
// Kinds of series: line (x, y, low, high), points (x, y, low, high, xlow, xhigh, text), bars (edges, y, base),
// rug (x, text), box (row, box, fliers). Text from the data goes into text nodes only.
"use strict";

// How a chart looks: its layout, its grid and each kind of series. What it does is in Chart.
class Drawing {
  // ------------------------------------------------------------------------------------------------ layout

  room() {
    return Math.round(this.stage.clientWidth);
  }

  visible() {
    return this.series.filter((_, i) => !this.hidden.has(i));
  }

  extent(axis) {
    const log = this.log[axis];
    const found = [];
    const window = axis === "y" && this.zoom ? this.zoom.x : null;
    const take = (v) => finite(v) && (!log || v > 0) && found.push(v);
    for (const s of this.visible()) {
      const near = (i) => !window || !s.x || (s.x[i] >= window[0] && s.x[i] <= window[1]);
      if (s.kind === "bars" && axis === "x") s.edges.forEach(take);
      else if (s.kind === "bars") s.y.forEach((v, i) => take(v + (s.base?.[i] ?? 0)));
      else if (s.kind === "box") axis === "x" && [...s.box, ...s.fliers].forEach(take);
      else if (s.kind !== "rug" || axis === "x") {
        const ends = axis === "x" ? [s.x, s.xlow, s.xhigh] : [s.y, s.low, s.high];
        for (const values of ends) values?.forEach((v, i) => near(i) && take(v));
      }
      if (s.kind === "bars" && axis === "y" && !log) take(0);
    }
    for (const m of this.spec.marks ?? []) if (finite(m[axis]) && m.within) take(m[axis]);
    return this.padded(axis, found, log);
  }

  padded(axis, found, log) {
    const own = this.spec[axis];
    if (own.categories) return [own.categories.length - 0.5, -0.5];
    let low = found.reduce((a, b) => Math.min(a, b), Infinity);
    let high = found.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!finite(low)) return log ? [0.1, 10] : [0, 1];
    if (finite(own.low) && !log) return [own.low, own.high];
    if (log) {
      if (own.start) low = own.start;
      else if (own.floor) low = Math.max(low, own.floor);
      if (high <= low) [low, high] = [low / 3, low * 3];
      const grow = Math.min((high / low) ** 0.04, 3);
      const fixed = own.floor || own.start;
      return [fixed ? low : Math.max(low / grow, 1e-300), Math.min(high * grow, 1e300)];
    }
    if (high === low) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const pad = 0.04 * (high - low);
    if (own.zero && low >= 0) return [0, high + pad];
    return own.tight ? [low, high] : [low - pad, high + pad];
  }

  axes() {
    const { width, height } = this;
    const [xl, xh] = this.zoom?.x ?? this.extent("x");
    const [yl, yh] = this.zoom?.y ?? this.extent("y");
    const names = this.spec.y.categories;
    const most = Math.max(...(names ?? []).map((n) => n.length), 0);
    const left = names ? Math.max(58, Math.min(12 + 6.6 * most, width * 0.38)) : 58;
    this.area = { left, right: width - 14, top: 12, bottom: height - 42 };
    this.x = scale(xl, xh, this.log.x, this.area.left, this.area.right);
    this.y = scale(yl, yh, this.log.y, this.area.bottom, this.area.top);
  }

  draw(width = this.room() || 640) {
    this.width = width;
    const rows = this.spec.y.categories?.length;
    const tall = this.spec.height ?? Math.max(220, Math.min(340, this.width * 0.5));
    this.height = rows ? rows * 24 + 66 : Math.min(tall, this.tallest ?? tall);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.axes();
    this.drawLegend();
    const id = `clip-${this.spec.id}`;
    const { left, right, top, bottom } = this.area;
    const clip = make(make(this.svg, "defs"), "clipPath", { id });
    make(clip, "rect", { x: left, y: top - 6, width: Math.max(right - left, 1), height: bottom - top + 8 });
    this.drawGrid();
    const plot = make(this.svg, "g", { "clip-path": `url(#${id})` });
    for (const m of this.spec.marks ?? []) this.drawMark(plot, m);
    for (const s of this.visible()) this[s.kind](make(plot, "g", { class: `ink-${s.color % INK}` }), s);
    this.over = make(this.svg, "g", { class: "over" });
    this.reset.hidden = !this.zoom;
    this.point(null, true); // what it told of may have moved
  }

  drawLegend() {
    this.legend.replaceChildren();
    const named = this.series.filter((s) => s.name && !s.silent);
    if (named.length < 2) return;
    this.series.forEach((s, i) => {
      if (!s.name || s.silent) return;
      const key = make(this.legend, "button", { type: "button", class: `key ink-${s.color % INK}`, title: s.name });
      make(key, "i", { class: s.kind });
      make(key, "span", {}, s.name);
      key.setAttribute("aria-pressed", !this.hidden.has(i));
      key.addEventListener("click", () => {
        const same = this.series.map((t, j) => [t, j]).filter(([t, j]) => j === i || (t.silent && t.name === s.name));
        const hide = !this.hidden.has(i);
        for (const [, j] of same) hide ? this.hidden.add(j) : this.hidden.delete(j);
        this.draw();
        this.legend.children[[...this.series.filter((t) => t.name && !t.silent)].indexOf(s)]?.focus();
      });
    });
  }

  drawGrid() {
    const { left, right, top, bottom } = this.area;
    const grid = make(this.svg, "g", { class: "grid" });
    const across = Math.max(3, Math.floor((right - left) / 90));
    const xs = this.log.x ? logTicks(this.x.low, this.x.high, across) : niceTicks(this.x.low, this.x.high, across);
    for (const t of xs) {
      const p = this.x.at(t);
      make(grid, "line", { x1: p, x2: p, y1: top, y2: bottom });
      make(grid, "text", { x: p, y: bottom + 17, "text-anchor": "middle" }, show(t));
    }
    make(grid, "line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom });
    make(grid, "text", { class: "title", x: right, y: bottom + 35, "text-anchor": "end" }, this.spec.x.label ?? "");
    if (this.spec.y.categories) return this.drawRows(grid);
    const up = Math.max(3, Math.floor((bottom - top) / 46));
    const ys = this.log.y ? logTicks(this.y.low, this.y.high, up * 1.5) : niceTicks(this.y.low, this.y.high, up);
    for (const t of ys) {
      const p = this.y.at(t);
      make(grid, "line", { x1: left, x2: right, y1: p, y2: p });
      make(grid, "text", { x: left - 8, y: p + 4, "text-anchor": "end" }, show(t));
    }
    const label = this.spec.y.label ? `↑ ${this.spec.y.label}` : "";
    make(grid, "text", { class: "title", x: left - 50, y: bottom + 35 }, label);
  }

  drawRows(grid) {
    const { left, right } = this.area;
    const most = Math.max(3, Math.floor((left - 12) / 6.6));
    this.spec.y.categories.forEach((name, i) => {
      const p = this.y.at(i);
      make(grid, "line", { x1: left, x2: right, y1: p, y2: p });
      const cut = name.length > most ? `…${name.slice(1 - most)}` : name; // names of layers differ at their ends
      const text = make(grid, "text", { class: "row", x: left - 8, y: p + 4, "text-anchor": "end" }, cut);
      make(text, "title", {}, name);
    });
  }

  drawMark(plot, m) {
    const { left, right, top, bottom } = this.area;
    const p = finite(m.x) ? this.x.at(m.x) : this.y.at(m.y);
    if (finite(m.x) && (p < left - 1 || p > right + 1 || (this.log.x && m.x <= 0))) return;
    const ends = finite(m.x) ? { x1: p, x2: p, y1: top, y2: bottom } : { x1: left, x2: right, y1: p, y2: p };
    make(plot, "line", { class: "mark", ...ends });
    if (!m.label) return;
    const late = p > right - 90;
    const at = finite(m.x) ? { x: p + (late ? -5 : 5), y: top + 8 } : { x: right - 4, y: p - 5 };
    make(plot, "text", { class: "mark", ...at, "text-anchor": late || !finite(m.x) ? "end" : "start" }, m.label);
  }

  // ------------------------------------------------------------------------------------------------ kinds of series

  path(xs, ys) {
    let path = "";
    let pen = false;
    xs.forEach((x, i) => {
      const fine = finite(x) && finite(ys[i]) && (!this.log.x || x > 0);
      if (fine) path += `${pen ? "L" : "M"}${this.x.at(x).toFixed(1)} ${this.clampY(ys[i]).toFixed(1)}`;
      pen = fine;
    });
    return path;
  }

  clampY(v) {
    const p = this.log.y && v <= 0 ? this.area.bottom + 40 : this.y.at(v);
    return Math.max(this.area.top - 400, Math.min(this.area.bottom + 400, p));
  }

  line(g, s) {
    if (s.low) {
      const rows = s.x.map((_, i) => i).filter((i) => finite(s.low[i]) && finite(s.high[i]));
      const back = rows.slice().reverse();
      const floor = (i) => (this.log.y && s.low[i] <= 0 ? this.y.low : s.low[i]);
      const ys = [...rows.map((i) => s.high[i]), ...back.map(floor)];
      const outline = this.path([...rows, ...back].map((i) => s.x[i]), ys);
      if (rows.length) make(g, "path", { class: "band", d: `${outline}Z` });
    }
    make(g, "path", { class: "curve", d: this.path(s.x, s.y) });
    if (s.x.length === 1) this.dots(g, s.x, s.y);
  }

  dots(g, xs, ys, name = "dots") {
    // one path of round caps: thousands of points are one node
    let path = "";
    xs.forEach((x, i) => {
      const there = finite(x) && finite(ys[i]) && (!this.log.x || x > 0) && (!this.log.y || ys[i] > 0);
      if (there) path += `M${this.x.at(x).toFixed(1)} ${this.y.at(ys[i]).toFixed(1)}h0`;
    });
    make(g, "path", { class: name, d: path });
  }

  points(g, s) {
    let path = "";
    s.x.forEach((x, i) => {
      const [px, py] = [this.x.at(x).toFixed(1), this.y.at(s.y[i]).toFixed(1)];
      if (s.xlow && finite(s.xlow[i]) && finite(s.xhigh[i])) {
        const ends = [s.xlow[i], s.xhigh[i]].map((v) => this.x.at(this.log.x ? Math.max(v, this.x.low) : v).toFixed(1));
        path += `M${ends[0]} ${py}H${ends[1]}`;
      }
      if (s.low && finite(s.low[i]) && finite(s.high[i])) {
        path += `M${px} ${this.clampY(s.low[i]).toFixed(1)}V${this.clampY(s.high[i]).toFixed(1)}`;
      }
    });
    if (path) make(g, "path", { class: "error", d: path });
    const many = this.series.some((t) => t.x?.length > 300);
    this.dots(g, s.x, s.y, many ? "dots many" : "dots");
  }

  bars(g, s) {
    let path = "";
    s.y.forEach((v, i) => {
      if (!v) return;
      const base = s.base?.[i] ?? 0;
      const [a, b] = [this.x.at(s.edges[i]), this.x.at(s.edges[i + 1])];
      const floor = this.log.y && base <= 0 ? this.area.bottom : this.y.at(base);
      const gap = b - a > 4 ? 0.5 : 0;
      path += `M${a + gap} ${floor}V${this.y.at(base + v)}H${b - gap}V${floor}Z`;
    });
    make(g, "path", { class: "bars", d: path });
  }

  rug(g, s) {
    const { bottom } = this.area;
    make(g, "path", { class: "rug", d: s.x.map((x) => `M${this.x.at(x).toFixed(1)} ${bottom}v-11`).join("") });
  }

  box(g, s) {
    const [low, q1, median, q3, high] = s.box.map((v) => this.x.at(v));
    const y = this.y.at(s.row);
    const whiskers = `M${low} ${y}H${q1}M${q3} ${y}H${high}M${low} ${y - 4}v8M${high} ${y - 4}v8`;
    make(g, "path", { class: "error", d: whiskers });
    make(g, "rect", { class: "box", x: q1, y: y - 7, width: Math.max(q3 - q1, 1), height: 14, rx: 2 });
    make(g, "path", { class: "median", d: `M${median} ${y - 7}v14` });
    this.dots(g, s.fliers, s.fliers.map(() => s.row), "dots many");
  }
}
