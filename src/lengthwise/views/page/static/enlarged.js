"use strict";
// One head in large, of each side: zoom, pan and a cursor that all sides share.

const EDGE = { left: 48, top: 8, right: 62, bottom: 34 };
const LEAST = 4;
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
  find("head-title").textContent = `Layer ${state.layer + 1}, head ${state.head + 1}`;
  for (const view of mapViews) {
    const layer = currentLayer(view.side);
    view.caption.textContent = mapViews.length > 1 ? nameOf(view.side) : "";
    view.figure.hidden = profile;
    view.layer = layer;
    if (!layer || profile) {
      view.caption.textContent = layer ? "" : `${nameOf(view.side)} has no layer ${state.layer + 1}, head ${state.head + 1} in this view.`;
      view.canvas.hidden = true;
      continue;
    }
    view.canvas.hidden = false;
    view.canvas.ariaLabel = `${state.what} of layer ${state.layer + 1}, head ${state.head + 1} of ${nameOf(view.side)}; arrow keys move the cursor`;
    paintHeat(view);
    drawMap(view);
  }
  noteMap();
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
  const { layer, side } = view;
  const seen = windowOf(layer);
  // Whole tiles need a pixel each; of single cells there are at most as many as a screen shows.
  const { pool } = layer;
  const tiled = layer.matrix.onlyTiles(state.head) && [seen.i, seen.j, seen.rows, seen.columns].every((n) => n % pool === 0);
  const count = (size) => (tiled ? size / pool : Math.min(size, MOST));
  const [rows, columns] = [count(seen.rows), count(seen.columns)];
  view.scale = scaleFor(side, layer, state.head);
  const row = Int32Array.from({ length: rows }, (_, y) => seen.i + Math.floor(((y + 0.5) * seen.rows) / rows));
  const column = Int32Array.from({ length: columns }, (_, x) => seen.j + Math.floor(((x + 0.5) * seen.columns) / columns));
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
    context.fillStyle = css(scale, scale.high - ((y + 0.5) / side) * (scale.high - scale.low));
    context.fillRect(left, EDGE.top + y, 8, 1.5);
  }
  context.fillStyle = colour("--quiet");
  context.textAlign = "left";
  for (const tick of ticks(scale.low, scale.high, 5)) {
    context.fillText(said(tick, 3), left + 12, EDGE.top + ((scale.high - tick) / (scale.high - scale.low)) * side);
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

function noteMap() {
  const layer = mapViews[0].layer;
  if (!layer || state.what === "profile") {
    find("map-note").textContent = layer ? "" : "Choose a head.";
    return;
  }
  const seen = windowOf(layer);
  const { i, j } = cursorOf(layer);
  const cells = layer.matrix.single(state.head, i, j) ? "Single cells" : `Tiles of ${layer.pool} × ${layer.pool} pairs, each its mean`;
  const part = seen.rows < layer.queries || seen.columns < layer.keys ? ` of queries ${seen.i} to ${seen.i + seen.rows - 1}, keys ${seen.j} to ${seen.j + seen.columns - 1}` : "";
  find("map-note").textContent = `${cells}${part}.${state.held ? " The cursor is held; click to let it go." : ""}`;
}

/** Make the visible part smaller or larger about a pair. */
function zoom(factor, about) {
  const layer = mapViews[0].layer;
  if (!layer || !layer.matrix) return;
  const seen = windowOf(layer);
  const cut = (size, all) => Math.min(all, Math.max(Math.min(LEAST, all), Math.round(size * factor)));
  const [rows, columns] = [cut(seen.rows, layer.queries), cut(seen.columns, layer.keys)];
  const { i, j } = about || cursorOf(layer);
  show({
    i: Math.round(i - ((i - seen.i) * rows) / seen.rows),
    j: Math.round(j - ((j - seen.j) * columns) / seen.columns),
    rows,
    columns,
  });
}

function show(wanted) {
  const layer = mapViews[0].layer;
  const cut = (place, size, all) => Math.min(Math.max(0, place), all - size);
  const { rows, columns } = wanted;
  state.window = { i: cut(wanted.i, rows, layer.queries), j: cut(wanted.j, columns, layer.keys), rows, columns };
  if (rows === layer.queries && columns === layer.keys) state.window = null;
  redrawMaps();
}

const redrawMaps = onFrame(() => {
  for (const view of mapViews) if (view.layer && view.layer.matrix) paintHeat(view), drawMap(view);
  noteMap();
  state.settled?.();
});

/** Put the cursor on a pair, bring it into sight if asked, and tell every part. */
function moveCursor(i, j, { follow = false, spoken = false } = {}) {
  const layer = mapViews[0].layer;
  if (!layer) return;
  state.cursor = { i: Math.min(Math.max(0, i), layer.queries - 1), j: Math.min(Math.max(0, j), layer.keys - 1) };
  if (follow && state.window) {
    const seen = windowOf(layer);
    const into = (place, start, size) => Math.min(Math.max(start, place - size + 1), place);
    const moved = { ...seen, i: into(state.cursor.i, seen.i, seen.rows), j: into(state.cursor.j, seen.j, seen.columns) };
    if (moved.i !== seen.i || moved.j !== seen.j) show(moved);
  }
  if (spoken) state.speak = true;
  redrawCursor();
}

const redrawCursor = onFrame(() => {
  for (const view of mapViews) if (view.layer && view.layer.matrix) drawMap(view);
  noteMap();
  drawReading();
  drawCurves();
  drawShades();
  state.settled?.();
});

function pairAt(view, event) {
  const box = view.canvas.getBoundingClientRect();
  const seen = windowOf(view.layer);
  const { left, top, side } = view.plot;
  return {
    i: seen.i + Math.floor(((event.clientY - box.top - top) / side) * seen.rows),
    j: seen.j + Math.floor(((event.clientX - box.left - left) / side) * seen.columns),
  };
}

function listen(view) {
  const { canvas } = view;
  const fingers = new Map();
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    grip = { x: event.clientX, y: event.clientY, seen: windowOf(view.layer), moved: false, apart: apart(fingers) };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event);
    if (fingers.size === 2) return pinch(view, fingers, grip);
    if (grip) return drag(view, event, grip);
    const { i, j } = pairAt(view, event);
    if (!state.held) moveCursor(i, j);
  });
  const leave = (event) => {
    if (grip && !grip.moved && event.type === "pointerup") {
      state.held = event.pointerType === "touch" ? false : !state.held;
      const { i, j } = pairAt(view, event);
      moveCursor(i, j);
    }
    fingers.delete(event.pointerId);
    if (!fingers.size) grip = null;
  };
  canvas.addEventListener("pointerup", leave);
  canvas.addEventListener("pointercancel", leave);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, pairAt(view, event));
  }, { passive: false });
  canvas.addEventListener("dblclick", () => show(whole(view.layer)));
  canvas.addEventListener("keydown", mapKey);
}

function drag(view, event, grip) {
  const [x, y] = [event.clientX - grip.x, event.clientY - grip.y];
  if (Math.hypot(x, y) < 5 && !grip.moved) return;
  grip.moved = true;
  const { seen } = grip;
  const { side } = view.plot;
  show({ ...seen, i: Math.round(seen.i - (y * seen.rows) / side), j: Math.round(seen.j - (x * seen.columns) / side) });
}

function apart(fingers) {
  const [a, b] = [...fingers.values()];
  return b ? Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY) : 0;
}

function pinch(view, fingers, grip) {
  const now = apart(fingers);
  if (!now || !grip.apart) return;
  grip.moved = true;
  const [a, b] = [...fingers.values()];
  zoom(grip.apart / now, pairAt(view, { clientX: (a.clientX + b.clientX) / 2, clientY: (a.clientY + b.clientY) / 2 }));
  grip.apart = now;
}

function mapKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { i, j } = state.cursor;
  const far = event.shiftKey ? 10 : 1;
  const moves = {
    ArrowUp: [i - far, j], ArrowDown: [i + far, j], ArrowLeft: [i, j - far], ArrowRight: [i, j + far],
    Home: [i, 0], End: [i, i], PageUp: [i - 100, j], PageDown: [i + 100, j],
  };
  const works = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "−": () => zoom(2), 0: () => show(whole(mapViews[0].layer)) };
  if (moves[event.key]) moveCursor(...moves[event.key], { follow: true, spoken: true });
  else if (works[event.key]) works[event.key]();
  else if (event.key === "Enter" || event.key === " ") (state.held = !state.held), noteMap();
  else return;
  event.preventDefault();
}
