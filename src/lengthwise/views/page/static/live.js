"use strict";
// The page over live models: it asks its own server for maps, and for single cells where the cursor rests.

const ROWS = 256;
const REFRESH = 10_000;

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `lengthwise serve` still running?");
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new Error(error || `The server answers ${answer.status}.`);
}

let offered = "";
let refresh = 0;

/** The models to choose from, and a card for each run and study; again and again while a run is training. */
async function fillChoices() {
  const { groups, runs, studies, limit } = await (await ask("api/choices")).json();
  if (offered !== JSON.stringify(groups)) fillModels(groups);
  offered = JSON.stringify(groups);
  find("length").max = limit;
  if (Number(find("length").value) > limit) find("length").value = limit;
  find("cards").replaceChildren(...runs.map(runCard), ...studies.map(studyCard));
  find("cards").hidden = !runs.length && !studies.length;
  clearTimeout(refresh);
  if (runs.some((run) => run.state === "training now")) {
    refresh = setTimeout(() => fillChoices().catch(() => {}), REFRESH);
  }
}

function fillModels(groups) {
  for (const id of ["first", "second"]) {
    const before = find(id).value;
    const nothing = id === "second" ? [make("option", { value: "" }, "nothing")] : [];
    const options = groups.filter((group) => group.names.length).map((group) =>
      make("optgroup", { label: group.label }, ...group.names.map((name) => make("option", { value: name }, name))));
    find(id).replaceChildren(...nothing, ...options);
    if ([...find(id).options].some((option) => option.value === before)) find(id).value = before;
  }
}

/** A run: its encoding, how far it is, and its losses as a line; a finished one can be looked at. */
function runCard({ name, encoding, step, steps, loss, state: now, finished, losses }) {
  const title = make(finished ? "button" : "span", finished ? { type: "button" } : {}, name);
  if (finished) {
    title.addEventListener("click", () => {
      find("first").value = name;
      lookAt();
    });
  }
  const far = step === undefined ? "" : `step ${step.toLocaleString("en")}${steps ? ` of ${steps.toLocaleString("en")}` : ""}`;
  const facts = [encoding, far, loss && `loss ${loss}`, now].filter(Boolean);
  const lines = facts.map((fact) => make("li", {}, fact));
  const card = make("div", { className: "card run" }, make("h3", {}, title), make("ul", {}, ...lines));
  if (losses.length > 1) card.append(sparkline(losses));
  card.setAttribute("role", "listitem");
  return card;
}

function sparkline(values) {
  const [width, height] = [160, 34];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const place = (y, n) =>
    `${((n * width) / (values.length - 1)).toFixed(1)},${(1 + ((high - y) * (height - 2)) / (high - low || 1)).toFixed(1)}`;
  const label = `Loss from ${formatNumber(values[0], 3)} to ${formatNumber(values[values.length - 1], 3)}`;
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "spark" });
  plot.append(svg("polyline", { points: values.map(place).join(" ") }));
  return plot;
}

/** A study: its table. */
function studyCard({ title, head, rows }) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, String(cell))));
  const body = make("tbody", {}, ...rows.map((row) => line(row, "td")));
  const table = make("table", {}, make("thead", {}, line(head, "th")), body);
  const card = make("div", { className: "card study" }, make("h3", {}, title), make("div", { className: "scroll" }, table));
  card.setAttribute("role", "listitem");
  return card;
}

let running = null;

/** Look at the chosen models; a look that is still computed is stopped first. */
async function lookAt() {
  running?.abort();
  const own = new AbortController();
  running = own;
  fault("");
  find("look").disabled = true;
  try {
    const text = find("reads").value === "text";
    const reads = text ? { text: find("words").value } : { length: Number(find("length").value) };
    const models = [];
    for (const model of [find("first").value, find("second").value].filter(Boolean)) {
      models.push(await lookAtOne({ model, layer: find("layers").value, ...reads }, own.signal));
    }
    await start(models, models.map((model) => `${model.encoding} (${model.name})`).join(" and "));
  } catch (error) {
    if (error.name === "AbortError") return;
    fault(error.message);
    fillChoices().catch(() => {});
  } finally {
    if (running === own) {
      running = null;
      find("progress").hidden = true;
      find("look").disabled = false;
    }
  }
}

/** One model: the server sends a line for every layer that is done, and the maps in the last. */
async function lookAtOne(wanted, signal) {
  showProgress(wanted.model, {});
  const headers = { "Content-Type": "application/json" };
  const answer = await ask("api/look", { method: "POST", headers, body: JSON.stringify(wanted), signal });
  let model = null;
  for await (const line of linesOf(answer.body)) {
    const message = JSON.parse(line);
    if (message.error) throw new Error(message.error);
    if (message.model) model = message.model;
    else showProgress(wanted.model, message);
  }
  if (!model) throw new Error("The server ended before the look was done. Is `lengthwise serve` still running?");
  return model;
}

async function* linesOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer. Is `lengthwise serve` still running?");
    }
    if (part.done) break;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
  if (rest) yield rest;
}

function showProgress(name, { done, layers }) {
  find("progress").hidden = false;
  const bar = find("bar");
  if (layers) Object.assign(bar, { max: layers, value: done });
  else bar.removeAttribute("value");
  find("progress-text").textContent = layers ? `${name}: ${done} of ${layers} ${layers === 1 ? "layer" : "layers"}` : `${name}: loading…`;
}

/** Ask for every cell of the query's row, and of the visible part once that is small; draw again if there were any. */
async function sharpen() {
  let learned = false;
  for (const side of state.sides) {
    const { look } = snapshotOf(side);
    if (!look || !side.reads) continue;
    for (const [what, layer] of Object.entries(side.reads)) {
      const { i, j } = cursorOf(layer);
      const { head } = state;
      const rows = layer.matrix.single(head, i, j) ? [] : [{ i, j: 0, rows: 1, columns: layer.keys }];
      const seen = windowOf(layer);
      const near = what === state.what && seen.rows <= ROWS && seen.columns <= ROWS;
      if (near && !layer.matrix.allSingle(head, seen)) rows.push(seen);
      for (const part of rows) {
        const query = new URLSearchParams({ look, quantity: what, layer: layer.layer, head, ...part });
        const answer = await ask(`api/cells?${query}`);
        layer.matrix.learn(head, { ...part, cells: new Float32Array(await answer.arrayBuffer()) });
        learned = true;
      }
    }
  }
  if (learned) redrawMaps(), redrawCursor();
}

let resting = 0;
state.settled = () => {
  clearTimeout(resting);
  resting = setTimeout(() => sharpen().catch((error) => fault(error.message)), 120);
};

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  lookAt();
});
find("stop").addEventListener("click", () => running?.abort());
find("reads").addEventListener("change", () => {
  const own = find("reads").value === "text";
  find("words-field").hidden = !own;
  find("length-field").hidden = own;
});
// The first model at once, by its last layer: something to see before anything is chosen.
fillChoices().then(lookAt).catch((error) => fault(error.message));
