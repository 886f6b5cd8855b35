"use strict";
// The mean against distance: the enlarged head in front of the others of its layer, shaded by its spread.

const CURVES = { width: 460, height: 250, left: 52, right: 14, top: 12, bottom: 40 };
const POINTS = 240;
/** A distance as it is drawn across, and back: both sides of 0 are bent alike. */
const bend = (d) => (state.log ? Math.sign(d) * Math.log10(1 + Math.abs(d)) : d);
const unbend = (x) => (state.log ? Math.sign(x) * (10 ** Math.abs(x) - 1) : x);
const between = (first, last, share) => unbend(bend(first) + share * (bend(last) - bend(first)));

function drawCurves() {
  const seen = state.sides.map((side) => ({ side, layer: currentLayer(side) })).filter((one) => one.layer);
  const box = state.what === "profile" ? { ...CURVES, width: 720, height: 420 } : CURVES;
  const plot = svg("svg", { viewBox: `0 0 ${box.width} ${box.height}`, role: "img", tabindex: 0 });
  const dotted = seen.some(({ layer }) => layer.kernel) ? "; dotted, the score of the mean query and key" : "";
  const title = { bias: "Bias by distance", profile: "Mean score by distance" }[state.what];
  find("curves-title").textContent = (title || `Mean of ${state.what} by distance`) + dotted;
  if (seen.length) fillCurves(plot, seen, box);
  const old = find("curves-plot").firstChild;
  const focused = old && old === document.activeElement;
  find("curves-plot").replaceChildren(plot);
  if (focused) plot.focus({ preventScroll: true });
}

function fillCurves(plot, seen, box) {
  const first = Math.min(...seen.map((one) => one.layer.profile.first));
  const last = Math.max(...seen.map((one) => one.layer.profile.first + one.layer.profile.length - 1));
  const all = seen.flatMap(({ layer }) => heights(layer));
  const scale = { low: Math.min(0, ...all.map((r) => r[0])), high: Math.max(0, ...all.map((r) => r[1])) };
  if (scale.low === scale.high) scale.high = 1;
  const [width, height] = [box.width - box.left - box.right, box.height - box.top - box.bottom];
  const across = (d) => box.left + ((bend(d) - bend(first)) / (bend(last) - bend(first) || 1)) * width;
  const down = (y) => box.top + ((scale.high - y) / (scale.high - scale.low)) * height;

  for (const tick of ticks(scale.low, scale.high, 5)) {
    const line = { x1: box.left, x2: box.left + width, y1: down(tick), y2: down(tick) };
    plot.append(svg("line", { class: tick === 0 ? "zero" : "rule", ...line }));
    plot.append(svg("text", { x: box.left - 6, y: down(tick) + 4, "text-anchor": "end" }, formatNumber(tick, 3)));
  }
  const tens = [0, 1, 10, 100, 1000, 10000, 100000];
  const signed = [...tens.slice(1).map((d) => -d), ...tens].filter((d) => first <= d && d <= last);
  const marks = state.log ? signed : ticks(first, last, 5);
  const below = (x, y, words) => plot.append(svg("text", { x, y: box.height - y, "text-anchor": "middle" }, words));
  for (const tick of marks) below(across(tick), 22, tick.toLocaleString("en"));
  below(box.left + width / 2, 6, "distance (query − key)");

  const path = (values, from, to = (y) => y) => {
    const parts = [];
    for (const place of places(values.length, from)) {
      if (Number.isNaN(values[place])) continue;
      parts.push(`${across(from + place).toFixed(1)},${down(to(values[place], place)).toFixed(1)}`);
    }
    return parts;
  };
  // An inner picture cuts off what lies beyond the range of the enlarged head.
  const size = { x: box.left, y: box.top, width, height };
  const inner = svg("svg", { ...size, viewBox: Object.values(size).join(" ") });
  plot.append(inner);
  seen.forEach(({ layer }, place) => {
    const { profile } = layer;
    if (place === 0) {
      for (let head = 0; head < layer.heads; head++) {
        if (head === state.head) continue;
        inner.append(svg("polyline", { class: "other", points: path(profile.mean(head), profile.first).join(" ") }));
      }
    }
    const [mean, spread] = [profile.mean(state.head), profile.spread(state.head)];
    if (spread && spread.some((x) => x > 0)) {
      const above = path(mean, profile.first, (y, at) => y + spread[at]);
      const beneath = path(mean, profile.first, (y, at) => y - spread[at]).reverse();
      inner.append(svg("polygon", { class: "spread", points: [...above, ...beneath].join(" ") }));
    }
    if (layer.kernel) inner.append(svg("polyline", { class: "kernel", points: path(kernelOf(layer), 0).join(" ") }));
    const points = path(mean, profile.first).join(" ");
    inner.append(svg("polyline", { class: place ? "chosen second" : "chosen", points }));
  });
  const distance = currentDistance();
  const here = across(distance);
  plot.append(svg("line", { class: "here", x1: here, x2: here, y1: box.top, y2: box.top + height }));
  const name = seen.map(({ layer }) => meanAt(layer, distance)).map((one) => formatNumber(one && one.mean, 3)).join(" and ");
  const now = `at distance ${distance} it is ${name}. Left and right keys change the distance.`;
  plot.setAttribute("aria-label", `Mean by distance of head ${state.head + 1}; ${now}`);
  listenCurves(plot, box, first, last, width);
}

/** The least and the greatest mean: of the enlarged head, or of all where they share a range. */
function heights(layer) {
  if (state.shared) return Array.from({ length: layer.heads }, (_, head) => profileRange(layer.profile.mean(head)));
  const own = profileRange(layer.profile.mean(state.head));
  return layer.kernel ? [own, profileRange(kernelOf(layer))] : [own];
}

/** The score of a rotary head's mean query and mean key at each distance. */
function kernelOf(layer) {
  const length = layer.kernel.length / layer.heads;
  return layer.kernel.subarray(state.head * length, (state.head + 1) * length);
}

function profileRange(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 0];
}

/** Some hundred places of a line, evenly apart as they are drawn. */
function places(length, first) {
  const chosen = new Set();
  for (let n = 0; n < POINTS; n++) {
    chosen.add(Math.round(between(first, first + length - 1, n / (POINTS - 1))) - first);
  }
  chosen.add(length - 1);
  return [...chosen].filter((place) => place < length).sort((a, b) => a - b);
}

const offsetOf = (layer) => (layer.causal ? layer.keys - layer.queries : 0);

function currentDistance() {
  const layer = state.sides.map(currentLayer).find(Boolean);
  const { i, j } = cursorOf(layer);
  return i + offsetOf(layer) - j;
}

function meanAt(layer, distance) {
  const place = distance - layer.profile.first;
  if (place < 0 || place >= layer.profile.length) return undefined;
  const spread = layer.profile.spread(state.head);
  return { mean: layer.profile.mean(state.head)[place], spread: spread ? spread[place] : 0 };
}

function listenCurves(plot, box, first, last, width) {
  const go = (distance) => {
    const layer = state.sides.map(currentLayer).find(Boolean);
    const near = Math.min(last, Math.max(first, distance));
    // The query nearest to the cursor's that has a key at this distance.
    const ahead = near - offsetOf(layer);
    const i = Math.min(layer.queries - 1, layer.keys - 1 + ahead, Math.max(state.cursor.i, ahead, 0));
    moveCursor(i, i - ahead, { follow: true, spoken: true });
  };
  plot.addEventListener("pointermove", (event) => {
    if (state.held || event.pointerType === "touch") return;
    const area = plot.getBoundingClientRect();
    const share = (((event.clientX - area.left) / area.width) * box.width - box.left) / width;
    go(Math.round(between(first, last, share)));
  });
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    go(currentDistance() + step * (event.shiftKey ? 10 : 1));
  });
}
