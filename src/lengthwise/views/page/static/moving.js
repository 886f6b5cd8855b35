"use strict";
// How one gets about in the enlarged head: zoom, pan and the cursor, by pointer, finger, wheel and key.

// How few queries and keys can be seen at a time.
const LEAST = 4;

/** Make the visible part smaller or larger about a pair: of the map that is acted on, or of the longest. */
function zoom(factor, about, layer = extent()) {
  if (!layer || state.what === "profile") return;
  const seen = windowOf(layer);
  const cut = (size, all) => Math.min(all, Math.max(Math.min(LEAST, all), Math.round(size * factor)));
  const [rows, columns] = [cut(seen.rows, layer.queries), cut(seen.columns, layer.keys)];
  const { i, j } = about || cursorOf(layer);
  const [up, left] = [Math.round(((i - seen.i) * rows) / seen.rows), Math.round(((j - seen.j) * columns) / seen.columns)];
  show({ i: i - up, j: j - left, rows, columns }, layer);
}

function show(wanted, layer) {
  const cut = (place, size, all) => Math.min(Math.max(0, place), all - size);
  const { rows, columns } = wanted;
  state.window = { i: cut(wanted.i, rows, layer.queries), j: cut(wanted.j, columns, layer.keys), rows, columns };
  if (rows === layer.queries && columns === layer.keys) state.window = null;
  redrawMaps();
}

function showWhole() {
  const all = extent();
  if (all) show(whole(all), all);
}

const redrawMaps = onFrame(() => {
  for (const view of mapViews) if (view.layer && view.layer.matrix) paintHeat(view), drawMap(view);
  noteMap();
  state.settled?.();
});

/** Put the cursor on a pair, bring it into sight if asked, and tell every part. */
function moveCursor(i, j, { follow = false, spoken = false } = {}) {
  const layer = extent();
  if (!layer) return;
  state.cursor = { i: Math.min(Math.max(0, i), layer.queries - 1), j: Math.min(Math.max(0, j), layer.keys - 1) };
  if (follow && state.window) {
    const seen = windowOf(layer);
    const into = (place, start, size) => Math.min(Math.max(start, place - size + 1), place);
    const { cursor } = state;
    const moved = { ...seen, i: into(cursor.i, seen.i, seen.rows), j: into(cursor.j, seen.j, seen.columns) };
    if (moved.i !== seen.i || moved.j !== seen.j) show(moved, layer);
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
    grip = gripOf(view, event, fingers);
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
    // A finger that stays drags from here on, what it did before is done; its lifting is no click.
    const [rest] = fingers.values();
    grip = rest ? { ...gripOf(view, rest, fingers), moved: true } : null;
  };
  canvas.addEventListener("pointerup", leave);
  canvas.addEventListener("pointercancel", leave);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, pairAt(view, event), view.layer);
  }, { passive: false });
  canvas.addEventListener("dblclick", () => show(whole(view.layer), view.layer));
  canvas.addEventListener("keydown", mapKey);
}

/** Where a hold on the map begins, and what was visible then. */
function gripOf(view, event, fingers) {
  const { clientX: x, clientY: y } = event;
  return { x, y, seen: windowOf(view.layer), moved: false, apart: apart(fingers) };
}

function drag(view, event, grip) {
  const [x, y] = [event.clientX - grip.x, event.clientY - grip.y];
  if (Math.hypot(x, y) < 5 && !grip.moved) return;
  grip.moved = true;
  const { seen } = grip;
  const { side } = view.plot;
  const [i, j] = [seen.i - (y * seen.rows) / side, seen.j - (x * seen.columns) / side].map(Math.round);
  show({ ...seen, i, j }, view.layer);
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
  const middle = { clientX: (a.clientX + b.clientX) / 2, clientY: (a.clientY + b.clientY) / 2 };
  zoom(grip.apart / now, pairAt(view, middle), view.layer);
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
  const [closer, further] = [() => zoom(0.5), () => zoom(2)];
  const works = { "+": closer, "=": closer, "-": further, "−": further, 0: showWhole };
  if (moves[event.key]) moveCursor(...moves[event.key], { follow: true, spoken: true });
  else if (works[event.key]) works[event.key]();
  else if (event.key === "Enter" || event.key === " ") (state.held = !state.held), noteMap();
  else return;
  event.preventDefault();
}
