"use strict";
// One head in large, of each side: its colours, ticks, colour bar, and the cursor that all sides share.

const EDGE = { left: 48, top: 8, right: 62, bottom: 34 };
const MOST = 640;

let mapViews = [];

function buildMaps() {
  mapViews = state.sides.map((side, place) => {
    const canvas = make("canvas", { tabIndex: 0, className: "map" });
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-roledescription", "map");
    const caption = make("figcaption", { className: "small" });
    const figure = make("figure", {}, caption, canvas);
    const view = { side, place, canvas, caption, figure, heat: document.createElement("canvas") };
    listen(view);
    return view;
  });
  find("maps").replaceChildren(...mapViews.map((view) => view.figure));
  document.querySelector("main").classList.toggle("two", mapViews.length > 1);
}

/** All there is of a layer. */
const whole = (layer) => ({ i: 0, j: 0, rows: layer.queries, columns: layer.keys });

function drawMaps() {
  const profile = state.what === "profile";
  find("enlarged").classList.toggle("profile", profile);
  const labels = [...new Set(state.sides.map((side) => currentLayer(side)?.label).filter(Boolean))].join(" and ");
  find("head-title").textContent = `Layer ${state.layer + 1}${labels && ` (${labels})`}, head ${state.head + 1}`;
  for (const view of mapViews) {
    const layer = currentLayer(view.side);
    view.caption.textContent = mapViews.length > 1 ? nameOf(view.side) : "";
    view.figure.hidden = profile;
    view.layer = layer;
    if (!layer || profile) {
      view.caption.textContent = layer ? "" : missingOf(view.side);
      view.canvas.hidden = true;
      continue;
    }
    view.canvas.hidden = false;
    const where = `layer ${state.layer + 1}, head ${state.head + 1} of ${nameOf(view.side)}`;
    view.canvas.ariaLabel = `${state.what} of ${where}; arrow keys move the cursor`;
    paintHeat(view);
    drawMap(view);
  }
  noteMap();
}

/** Why a side has nothing to enlarge: many encodings, such as RoPE, add no bias, and are seen in other views. */
function missingOf(side) {
  const { views } = snapshotOf(side);
  const isHere = (one) => one.layer === state.layer && state.head < one.heads;
  const others = WHATS.filter((what) => what !== "profile" && views[what]?.some(isHere));
  if (state.what === "bias" && others.length) {
    return `${nameOf(side)} adds no bias in layer ${state.layer + 1}; see the views ${others.join(", ")}.`;
  }
  return `${nameOf(side)} has no layer ${state.layer + 1}, head ${state.head + 1} in this view.`;
}

/** How many queries and keys the longest map has: what the shared window and cursor are cut to. */
function extent() {
  const layers = mapViews.map((view) => view.layer).filter(Boolean);
  if (!layers.length) return undefined;
  const most = (size) => Math.max(...layers.map((layer) => layer[size]));
  return { queries: most("queries"), keys: most("keys") };
}

/** The visible part of a layer: the shared window, cut to what this side has. */
function windowOf(layer) {
  const all = whole(layer);
  const seen = state.window || all;
  const rows = Math.min(seen.rows, all.rows);
  const columns = Math.min(seen.columns, all.columns);
  return { i: Math.min(seen.i, all.rows - rows), j: Math.min(seen.j, all.columns - columns), rows, columns };
}

/** Numbers to colours, a pixel a cell or fewer; the result is kept while only the cursor moves. */
function paintHeat(view) {
  const { layer } = view;
  const seen = windowOf(layer);
  // Whole tiles need a pixel each; of single cells there are at most as many as a screen shows.
  const { pool } = layer;
  const even = [seen.i, seen.j, seen.rows, seen.columns].every((n) => n % pool === 0);
  const tiled = even && layer.matrix.onlyTiles(state.head);
  const count = (size) => (tiled ? size / pool : Math.min(size, MOST));
  const [rows, columns] = [count(seen.rows), count(seen.columns)];
  view.scale = scaleFor(layer, state.head, !layer.matrix.onlyTiles(state.head));
  const spread = (count, start, size) =>
    Int32Array.from({ length: count }, (_, n) => start + Math.floor(((n + 0.5) * size) / count));
  const [row, column] = [spread(rows, seen.i, seen.rows), spread(columns, seen.j, seen.columns)];
  paint(view.heat, columns, rows, view.scale, (y, x) => layer.matrix.at(state.head, row[y], column[x]));
}

function drawMap(view) {
  const { canvas, layer, heat, scale } = view;
  const seen = windowOf(layer);
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 480;
  const side = Math.max(80, width - EDGE.left - EDGE.right);
  const height = side + EDGE.top + EDGE.bottom;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  view.plot = { left: EDGE.left, top: EDGE.top, side };
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  context.drawImage(heat, EDGE.left, EDGE.top, side, side);
  context.strokeStyle = colour("--line");
  context.strokeRect(EDGE.left - 0.5, EDGE.top - 0.5, side + 1, side + 1);
  drawTicks(context, seen, side);
  drawBar(context, scale, side);
  drawCursor(context, view, seen);
}

function drawTicks(context, seen, side) {
  context.fillStyle = colour("--quiet");
  context.font = `11px ${colour("--sans")}`;
  const most = side > 300 ? 6 : 4;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const tick of ticks(seen.j, seen.j + seen.columns - 1, most)) {
    context.fillText(tick, EDGE.left + ((tick - seen.j + 0.5) * side) / seen.columns, EDGE.top + side + 5);
  }
  context.fillText("key", EDGE.left + side / 2, EDGE.top + side + 20);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of ticks(seen.i, seen.i + seen.rows - 1, most)) {
    context.fillText(tick, EDGE.left - 6, EDGE.top + ((tick - seen.i + 0.5) * side) / seen.rows);
  }
  context.save();
  context.translate(9, EDGE.top + side / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText("query", 0, 0);
  context.restore();
}

function drawBar(context, scale, side) {
  const left = EDGE.left + side + 10;
  for (let y = 0; y < side; y++) {
    context.fillStyle = css(scale, valueAt(scale, 1 - (y + 0.5) / side));
    context.fillRect(left, EDGE.top + y, 8, 1.5);
  }
  context.fillStyle = colour("--quiet");
  context.textAlign = "left";
  for (const tick of scale.log ? logTicks(scale.low, scale.high) : ticks(scale.low, scale.high, 5)) {
    context.fillText(formatNumber(tick, 3), left + 12, EDGE.top + (1 - shareOf(scale, tick)) * side);
  }
}

/** Lines along the query's row and the key's column, light on dark and dark on light, and the cell itself. */
function drawCursor(context, view, seen) {
  const { i, j } = cursorOf(view.layer);
  const { left, top, side } = view.plot;
  const [high, wide] = [side / seen.rows, side / seen.columns];
  const [y, x] = [top + (i - seen.i) * high, left + (j - seen.j) * wide];
  const [seesRow, seesColumn] = [i >= seen.i && i < seen.i + seen.rows, j >= seen.j && j < seen.j + seen.columns];
  for (const [style, width] of [[colour("--paper"), 3], [colour("--ink"), 1]]) {
    context.strokeStyle = style;
    context.lineWidth = width;
    context.globalAlpha = 0.75;
    context.beginPath();
    if (seesRow) context.moveTo(left, y + high / 2), context.lineTo(left + side, y + high / 2);
    if (seesColumn) context.moveTo(x + wide / 2, top), context.lineTo(x + wide / 2, top + side);
    context.stroke();
    context.globalAlpha = 1;
  }
  if (!seesRow || !seesColumn) return;
  const half = Math.max(4, Math.max(high, wide) / 2);
  for (const [style, width] of [[colour("--paper"), 4], [colour("--accent"), 2]]) {
    context.strokeStyle = style;
    context.lineWidth = width;
    context.strokeRect(x + wide / 2 - half, y + high / 2 - half, 2 * half, 2 * half);
  }
}

/** The shared cursor, cut to what a layer has. */
function cursorOf(layer) {
  return { i: Math.min(state.cursor.i, layer.queries - 1), j: Math.min(state.cursor.j, layer.keys - 1) };
}

/** What the visible part of a map is made of. */
function cellsOf(layer) {
  const seen = windowOf(layer);
  if (layer.matrix.allSingle(state.head, seen)) return "Single cells";
  const tiles = `Tiles of ${layer.pool} × ${layer.pool} pairs, each its mean`;
  return layer.matrix.someSingle(state.head, seen) ? `${tiles}, and some single cells` : tiles;
}

function noteMap() {
  const all = extent();
  if (!all || state.what === "profile") {
    find("map-note").textContent = all ? "" : "Choose a head.";
    return;
  }
  const seen = windowOf(all);
  const drawn = mapViews.filter((view) => view.layer?.matrix);
  const kinds = drawn.map((view) => (view.scale.allZero ? "0 everywhere" : cellsOf(view.layer)));
  const named = drawn.map((view, place) => `${kinds[place]} (${nameOf(view.side)})`);
  const cells = new Set(kinds).size === 1 ? kinds[0] : named.join("; ");
  const span = (start, size) => `${start} to ${start + size - 1}`;
  const colours = state.what === "weights" ? "; colours follow the logarithm" : "";
  const part = state.window ? `; queries ${span(seen.i, seen.rows)}, keys ${span(seen.j, seen.columns)}` : "";
  find("map-note").textContent = `${cells}${part}${colours}.${state.held ? " The cursor is held; click to let it go." : ""}`;
}
