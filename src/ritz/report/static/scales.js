// Numbers as text, ticks and scales; what the charts of the report stand on. Nothing is fetched.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const INK = 9; // colours in the style sheet
const finite = (v) => v !== null && v !== undefined && Number.isFinite(v);

function make(parent, name, attributes = {}, text = "") {
  const svg = parent.namespaceURI === SVG || name === "svg";
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  return parent.appendChild(node);
}

// A number to four digits, as people write it.
function show(v) {
  if (!finite(v)) return "–";
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size < 1e-3 || size >= 1e6) {
    const [digits, power] = v.toExponential(3).split("e");
    const raised = [...String(+power)].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join("");
    return `${+digits === 1 ? "" : +digits === -1 ? "−" : `${String(+digits).replace("-", "−")}·`}10${raised}`;
  }
  if (size >= 1e4) return Math.round(v).toLocaleString("en").replace("-", "−");
  return String(+v.toPrecision(4)).replace("-", "−");
}

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((s) => s * power >= raw * 0.999) ?? 10);
  const first = Math.ceil(low / step - 1e-9);
  const found = Array.from({ length: 4 * count }, (_, i) => +((first + i) * step).toPrecision(12));
  return found.filter((t, i) => t <= high + 1e-9 * step && t !== found[i - 1]);
}

function logTicks(low, high, count) {
  const [a, b] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  if (b - a < 1) {
    const few = [];
    for (let p = a - 1; p <= b + 1; p++) for (const s of [1, 2, 5]) few.push(s * 10 ** p);
    const inside = few.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    return inside.length > 1 ? inside : niceTicks(low, high, count);
  }
  const stride = Math.max(1, Math.ceil((b - a + 1) / Math.max(count, 2)));
  const found = [];
  for (let p = a; p <= b; p += stride) found.push(+`1e${p}`);
  return found;
}

// From numbers between low and high to pixels between a and b, and back.
function scale(low, high, log, a, b) {
  const f = log ? Math.log10 : (v) => v;
  const [from, to] = [f(low), f(high)];
  const at = (v) => a + ((f(log ? Math.max(v, low * 1e-3) : v) - from) / (to - from || 1)) * (b - a);
  const back = (p) => {
    const v = from + ((p - a) / (b - a)) * (to - from);
    return log ? 10 ** v : v;
  };
  return { low, high, log, at, back };
}

// The place of the number that is nearest; the list need not be in order.
function nearest(values, target) {
  let best = null;
  values.forEach((v, i) => {
    if (finite(v) && (best === null || Math.abs(v - target) < Math.abs(values[best] - target))) best = i;
  });
  return best;
}
