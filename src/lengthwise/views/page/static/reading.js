"use strict";
// What stands at the cursor, in numbers and in words, and the text shaded by how strongly the query sees it.

const READ = ["bias", "content", "scores", "weights"];
let lastReading = 0;

/** The layer of another view at the same place, opened. */
async function openReading() {
  const mine = (lastReading += 1);
  for (const side of state.sides) {
    const reads = {};
    for (const what of READ) {
      const layer = (snapshotOf(side).views[what] || []).find((one) => one.layer === state.layer);
      if (!layer || state.head >= layer.heads) continue;
      try {
        const opened = await openLayer(layer);
        await opened.matrix.openBounds();
        reads[what] = opened;
      } catch (error) {
        fault(`${what} of layer ${state.layer + 1} cannot be read: ${error.message}`);
      }
    }
    // Not before all are open, since meanwhile the old ones can still be drawn; and not if another head was chosen.
    if (mine === lastReading) side.reads = reads;
  }
}

function tokenAt(side, place) {
  const { tokens } = snapshotOf(side);
  return tokens && place < tokens.length ? readable(tokens[place]) : "";
}

function drawReading() {
  const sides = state.sides.filter(currentLayer);
  const names = ["", ...sides.map(nameOf)].map((name) => make("th", { scope: "col" }, name));
  const head = make("tr", {}, ...names);
  find("reading").tHead.replaceChildren(...(sides.length > 1 ? [head] : []));
  const row = (name, cells) => make("tr", {}, make("th", { scope: "row" }, name), ...cells);
  const rows = [
    row("query", sides.map((side) => place(side, cursorOf(currentLayer(side)).i, "query"))),
    row("key", sides.map((side) => place(side, cursorOf(currentLayer(side)).j, "key"))),
    row("distance", sides.map((side) => valueCell("distance", distanceOf(side), formatNumber(distanceOf(side), 9)))),
  ];
  for (const what of READ) {
    const known = sides.some((side) => side.reads && side.reads[what]);
    if (known) rows.push(row(what, sides.map((side) => reading(side, what))));
  }
  rows.push(row("mean here", sides.map(meanCell)));
  find("reading").tBodies[0].replaceChildren(...rows);
  if (state.speak) speak(sides);
}

function distanceOf(side) {
  const layer = currentLayer(side);
  const { i, j } = cursorOf(layer);
  return i + offsetOf(layer) - j;
}

function place(side, at, which) {
  const cell = make("td", {}, String(at));
  cell.dataset.read = which;
  cell.dataset.value = at;
  const token = tokenAt(side, at);
  if (token) cell.append(" ", make("q", {}, token));
  return cell;
}

function valueCell(what, value, text, more = "") {
  const cell = make("td", {}, text);
  cell.dataset.read = what;
  cell.dataset.value = value;
  if (more) cell.append(" ", make("span", { className: "quiet small" }, more));
  return cell;
}

function reading(side, what) {
  const layer = side.reads && side.reads[what];
  if (!layer) return make("td", {}, "–");
  const { i, j } = cursorOf(layer);
  const value = layer.matrix.at(state.head, i, j);
  if (Number.isNaN(value)) return valueCell(what, "", "–", "masked");
  if (layer.matrix.single(state.head, i, j)) return valueCell(what, value, formatNumber(value));
  const [least, greatest] = layer.matrix.bounds(state.head, i, j);
  const more = `mean of ${layer.pool} × ${layer.pool}, ${formatNumber(least, 2)} to ${formatNumber(greatest, 2)}`;
  const cell = valueCell(what, value, formatNumber(value, 3), more);
  Object.assign(cell.dataset, { least, greatest, pool: layer.pool });
  return cell;
}

function meanCell(side) {
  const { mean, spread } = meanAt(currentLayer(side), distanceOf(side)) || { mean: NaN };
  if (Number.isNaN(mean)) return make("td", {}, "–");
  return valueCell("mean", mean, formatNumber(mean, 3), spread ? `± ${formatNumber(spread, 2)}` : "");
}

function speak(sides) {
  state.speak = false;
  const rows = [...find("reading").rows].filter((row) => row.cells[0].scope === "row");
  find("spoken").textContent = rows.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ")).join("; ");
}

/** Every token as text; a click makes it the query, and pointing at it the key. */
function drawTokens() {
  const blocks = state.sides.map((side, which) => {
    const { tokens } = snapshotOf(side);
    if (!tokens) return make("p", { className: "quiet" }, "This model's tokens are not known as text.");
    const block = make("p", { className: "tokens" });
    block.dataset.side = which;
    tokens.forEach((token, at) => {
      const span = make("span", {}, readable(token));
      span.dataset.at = at;
      block.append(span);
      if (/[Ċ\n]/.test(token)) block.append(make("br"));
    });
    return state.sides.length > 1 ? make("div", {}, make("h3", {}, nameOf(side)), block) : block;
  });
  find("tokens").replaceChildren(...blocks);
  search();
}

/** Bring the query's token into sight, inside the box of the text alone. */
function scrollToQuery() {
  const span = document.querySelector(`.tokens span[data-at="${state.cursor.i}"]`);
  const box = find("tokens");
  if (span) box.scrollTop = Math.max(0, span.offsetTop - box.offsetTop - box.clientHeight / 2);
}

/** The view that a side's text is shaded by: the weights, or what there is. */
const shadedBy = (side) => ["weights", state.what, "scores", "bias"].find((what) => side.reads?.[what]);

/** How strongly the query sees each key: the weights, or the softmax over the row of what there is. */
function sharesOf(side) {
  const what = shadedBy(side);
  if (!what) return null;
  const layer = side.reads[what];
  const { i } = cursorOf(layer);
  const row = Float64Array.from({ length: layer.keys }, (_, j) => layer.matrix.at(state.head, i, j));
  if (what === "weights") return row;
  const top = row.reduce((a, b) => (b > a ? b : a), -Infinity);
  const weights = row.map((x) => (Number.isNaN(x) ? NaN : Math.exp(x - top)));
  const sum = weights.reduce((a, b) => a + (Number.isNaN(b) ? 0 : b), 0);
  return weights.map((x) => x / sum);
}

/** Shade the tokens; thousands of them, so only those that change are touched. */
function drawShades() {
  const accent = colour("--accent");
  for (const block of document.querySelectorAll(".tokens")) {
    const side = state.sides[block.dataset.side];
    if (!side) continue;
    const layer = currentLayer(side);
    const shares = layer ? sharesOf(side) : null;
    const top = shares ? shares.reduce((a, b) => (b > a ? b : a), 0) : 0;
    const { i, j } = layer ? cursorOf(layer) : {};
    const query = layer ? i + offsetOf(layer) : NaN;
    for (const span of block.getElementsByTagName("span")) {
      const place = Number(span.dataset.at);
      const share = top && shares[place] > 0 ? Math.round((100 * shares[place]) / top) : 0;
      const ahead = layer && layer.causal && place > query ? "ahead" : "";
      const kind = place === query ? "query" : place === j ? "key" : ahead;
      const look = `${accent} ${share} ${kind}`;
      if (span.look === look) continue;
      span.look = look;
      span.style.backgroundColor = share ? `${accent}${Math.round(share * DEEPEST).toString(16).padStart(2, "0")}` : "";
      for (const name of ["query", "key", "ahead"]) span.classList.toggle(name, name === kind);
    }
  }
  noteText();
}

// The strongest shade, for a share of 100: dark enough to see, light enough to read on.
const DEEPEST = 1.58;

function noteText() {
  const side = state.sides.find((each) => currentLayer(each) && shadedBy(each));
  const click = state.sides.some((each) => snapshotOf(each).tokens) ? " Click a token to look from there." : "";
  if (!side) {
    find("text-note").textContent = `Not shaded: this page has no number for each query and key here.${click}`;
    return;
  }
  const what = shadedBy(side);
  const read = side.reads[what];
  const { i } = cursorOf(read);
  const from = what === "weights" ? "weights of attention" : `softmax of the row's ${what}`;
  const pooled = read.matrix.single(state.head, i, 0) ? "" : `, means of ${read.pool} × ${read.pool} pairs`;
  find("text-note").textContent = `Seen from query ${i}: ${from}${pooled}.${click}`;
}

/** Mark the tokens that contain the search words, and go to the next one after the query. */
function search(direction = 0) {
  const words = find("search").value.toLowerCase();
  const spans = [...document.querySelectorAll(".tokens[data-side='0'] span")];
  const matches = spans.filter((span) => words && span.textContent.toLowerCase().includes(words));
  for (const span of spans) span.classList.toggle("found", false);
  for (const span of matches) span.classList.toggle("found", true);
  find("found").textContent = words ? `${matches.length} found` : "";
  if (!direction || !matches.length) return;
  const places = matches.map((span) => Number(span.dataset.at));
  const { i } = state.cursor;
  const [after, before] = [places.find((at) => at > i), places.findLast((at) => at < i)];
  const next = direction > 0 ? after ?? places[0] : before ?? places[places.length - 1];
  moveCursor(next, Math.min(state.cursor.j, next), { follow: true, spoken: true });
  spans[next].scrollIntoView({ block: "nearest" });
}
