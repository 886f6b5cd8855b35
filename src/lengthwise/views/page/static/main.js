"use strict";
// The controls, and which part is drawn anew when.

const WHATS = ["bias", "content", "scores", "weights", "profile"];

/** Take models, choose what to show first, and draw. */
async function start(models, title) {
  state.models = models;
  const last = models[0].snapshots.length - 1;
  state.sides = models.slice(0, 2).map((model, place) => ({ model: place, snapshot: model.snapshots.length - 1 }));
  const views = models[0].snapshots[last].views;
  if (!views[state.what]) state.what = views.scores ? "scores" : WHATS.find((what) => views[what]);
  const layers = views[state.what];
  const same = layers.find((layer) => layer.layer === state.layer && state.head < layer.heads);
  if (!same || !state.started) Object.assign(state, { layer: layers[layers.length - 1].layer, head: 0 });
  const { queries, keys } = layers[0];
  state.window = null;
  state.held = false;
  state.cursor = { i: queries - 1, j: Math.max(0, keys - 1 - Math.floor(keys / 4)) };
  state.started = true;
  drawn = null;
  find("title").textContent = title;
  document.title = title;
  find("controls").hidden = document.querySelector("main").hidden = false;
  buildWhats();
  buildSides();
  await rebuild();
}

/** How much of a model is shown, in a line. */
function aboutOf(side) {
  const model = state.models[side.model];
  const [layer] = side.layers;
  const layers = side.layers.length;
  const square = layer.queries === layer.keys;
  const [queries, keys] = [layer.queries, layer.keys].map((n) => n.toLocaleString("en"));
  const size = square ? `${queries} tokens` : `${queries} queries by ${keys} keys`;
  const which = model.shown === "mean" ? "mean" : "the first";
  const seen = model.sequences > 1 ? `${which} of ${model.sequences} sequences` : "one sequence";
  return `${layers} ${layers === 1 ? "layer" : "layers"} of ${layer.heads} heads, ${size}, ${seen}`;
}

let building = Promise.resolve();
let drawn = null;

/** Everything anew: other sides, another view, another snapshot. One at a time, so that the last choice stays. */
function rebuild() {
  building = building.then(build);
  return building;
}

/** Draw what is chosen. What cannot be drawn is said, and the page goes on with what it had. */
async function build() {
  const { what } = state;
  const sides = state.sides.map(({ model, snapshot }) => ({ model, snapshot }));
  // A body that is not busy shows the last choice: screen readers wait for that, and so do tests.
  document.body.ariaBusy = "true";
  fault("");
  try {
    await openSides();
    await openReading();
    buildMaps();
    drawTokens();
    drawOverview();
    drawAll();
    const about = state.sides.filter((side) => side.layers.length).map(aboutOf);
    find("about").textContent = [...new Set(about)].join(" and ");
    drawn = { what, sides };
    scrollToQuery();
  } catch (error) {
    await goBack(what, error);
  }
}

/** After a view that failed: its message, and the last view that could be drawn, unless another is chosen already. */
async function goBack(failed, error) {
  fault(`${failed} of this model cannot be drawn: ${error.message}`);
  document.body.ariaBusy = "false";
  if (!drawn || state.what !== failed) return;
  Object.assign(state, { what: drawn.what, sides: drawn.sides });
  drawn = null;
  buildWhats();
  buildSides();
  const message = find("message").textContent;
  await build();
  fault(message);
}

function drawAll() {
  drawMaps();
  drawBeside();
}

function drawBeside() {
  drawReading();
  drawCurves();
  document.body.ariaBusy = "false";
  shadeSoon();
  state.settled?.();
}

/** Shade the text after the frame in which the map is seen: a long text takes longer than a map. */
function shadeSoon() {
  find("tokens").ariaBusy = "true";
  requestAnimationFrame(() => setTimeout(() => {
    drawShades();
    find("tokens").ariaBusy = "false";
  }));
}

/** Enlarge a head: its map at once, the numbers beside it when they are unpacked. */
async function choose(layer, head) {
  Object.assign(state, { layer, head });
  document.body.ariaBusy = "true";
  markHead();
  drawMaps();
  await openReading();
  drawBeside();
}

function buildWhats() {
  const has = (what) => state.sides.some((side) => snapshotOf(side).views[what]);
  const labels = WHATS.filter(has).map((what) => {
    const input = make("input", { type: "radio", name: "what", value: what, checked: what === state.what });
    input.addEventListener("change", () => {
      state.what = what;
      rebuild();
    });
    return make("label", {}, input, make("span", {}, what));
  });
  find("whats").replaceChildren(find("whats").firstElementChild, ...labels);
}

/** Which model and which snapshot stands on which side. */
function buildSides() {
  const several = state.models.length > 1 || state.models.some((model) => model.snapshots.length > 1);
  const blocks = state.sides.map((side, place) => {
    const block = make("div", { className: "side", role: "group", ariaLabel: place ? "Second side" : "First side" });
    if (state.models.length > 1) block.append(modelSelect(side, place));
    if (state.models[side.model].snapshots.length > 1) block.append(snapshotSlider(side, place));
    return block;
  });
  if (several) {
    const two = state.sides.length > 1;
    const attributes = { type: "button", id: "compare", ariaPressed: String(two) };
    const button = make("button", attributes, two ? "Show one" : "Compare two");
    button.addEventListener("click", () => {
      if (two) state.sides.pop();
      else state.sides.push(secondSide());
      buildWhats();
      buildSides();
      rebuild();
    });
    blocks.push(button);
  }
  find("sides").replaceChildren(...blocks);
}

/** Another model if there is one, else the first snapshot of the same. */
function secondSide() {
  const [first] = state.sides;
  const model = state.models.length > 1 ? (first.model + 1) % state.models.length : first.model;
  return { model, snapshot: model === first.model ? 0 : state.models[model].snapshots.length - 1 };
}

function modelSelect(side, place) {
  const options = state.models.map((model, at) =>
    make("option", { value: at, selected: at === side.model }, `${model.encoding}: ${model.name}`));
  const select = make("select", { id: `model-${place}` }, ...options);
  select.addEventListener("change", () => {
    side.model = Number(select.value);
    side.snapshot = state.models[side.model].snapshots.length - 1;
    buildWhats();
    buildSides();
    rebuild();
  });
  return make("label", { className: "field" }, place ? "Second model" : "Model", select);
}

function snapshotSlider(side, place) {
  const { snapshots } = state.models[side.model];
  const label = make("output", { className: "small" });
  const slider = make("input", { type: "range", id: `snapshot-${place}`, min: 0, max: snapshots.length - 1, step: 1 });
  slider.value = side.snapshot;
  const tell = () => {
    const { step } = snapshots[side.snapshot];
    label.textContent = slider.ariaValueText = step === null ? "the end" : `step ${step.toLocaleString("en")}`;
  };
  slider.addEventListener("input", () => {
    side.snapshot = Number(slider.value);
    tell();
    rebuild();
  });
  tell();
  return make("label", { className: "field" }, "Training", slider, label);
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  if (state.started) drawAll(), state.what === "profile" && drawOverview();
}

function fault(words) {
  find("message").textContent = words;
  find("message").hidden = !words;
}

function wire() {
  for (const input of document.querySelectorAll("#range input")) {
    input.addEventListener("change", () => {
      state.shared = input.value === "shared";
      drawOverview();
      drawAll();
    });
  }
  find("order").addEventListener("change", (event) => {
    state.order = event.target.value;
    drawOverview();
  });
  find("log").addEventListener("change", (event) => {
    state.log = event.target.checked;
    drawCurves();
  });
  find("grids").addEventListener("keydown", walkOverview);
  find("closer").addEventListener("click", () => zoom(0.5));
  find("further").addEventListener("click", () => zoom(2));
  find("whole").addEventListener("click", showWhole);
  find("theme").addEventListener("click", switchTheme);
  find("search").addEventListener("input", () => search());
  find("search").addEventListener("keydown", (event) => event.key === "Enter" && search(event.shiftKey ? -1 : 1));
  find("next").addEventListener("click", () => search(1));
  find("previous").addEventListener("click", () => search(-1));
  find("tokens").addEventListener("click", (event) => {
    const at = event.target.dataset.at;
    if (at !== undefined) moveCursor(Number(at), Math.min(state.cursor.j, Number(at)), { follow: true, spoken: true });
  });
  find("tokens").addEventListener("pointerover", (event) => {
    const at = event.target.dataset.at;
    if (at === undefined || state.held || event.pointerType === "touch") return;
    moveCursor(state.cursor.i, Number(at), { follow: true });
  });
  find("tokens").addEventListener("keydown", mapKey);
  let width = 0;
  new ResizeObserver(() => {
    if (mapViews.length && width !== find("maps").clientWidth) redrawMaps();
    width = find("maps").clientWidth;
  }).observe(find("maps"));
}

const data = JSON.parse(find("data").textContent);
openPalettes(data.palettes);
wire();
// After the first frame, so that there is something to see while the maps are unpacked.
if (data.models.length) {
  requestAnimationFrame(() => setTimeout(() => {
    start(data.models, data.title).catch((error) => fault(`The page cannot be drawn: ${error.message}`));
  }));
}
