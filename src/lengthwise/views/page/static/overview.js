"use strict";
// All heads in small: a button each, a row per layer, or one after another in the order of a measure. One layer alone
// has larger ones, four across as in the figures.

function drawOverview() {
  const grids = state.sides.map((side, place) => {
    if (!side.layers.length) {
      const none = state.what === "bias" ? "Adds no bias." : `Has nothing to see as ${state.what}.`;
      return make("div", {}, make("h3", {}, nameOf(side)), make("p", { className: "quiet" }, none));
    }
    const label = `Heads of ${nameOf(side)}`;
    const grid = make("div", { className: "grid", role: "group", ariaLabel: label });
    grid.dataset.side = place;
    const columns = Math.max(1, ...side.layers.map((layer) => layer.heads));
    const alone = state.order === "place" && side.layers.length === 1;
    const byLayer = state.order === "place" && !alone;
    grid.style.setProperty("--columns", alone ? Math.min(4, columns) : columns);
    grid.classList.toggle("by-layer", byLayer);
    grid.classList.toggle("alone", alone);
    if (byLayer) {
      const label = (_, head) => make("span", { className: "label" }, String(head + 1));
      grid.append(make("span"), ...Array.from({ length: columns }, label));
    }
    let row = null;
    for (const one of ordered(side)) {
      if (byLayer && one.layer !== row) {
        row = one.layer;
        grid.append(make("span", { className: "label row" }, `${row.layer + 1} ${row.label}`.trim()));
      }
      const button = headButton(one);
      if (alone) button.append(make("span", { className: "label" }, `Head ${one.head + 1}`));
      grid.append(button);
    }
    return state.sides.length > 1 ? make("div", {}, make("h3", {}, nameOf(side)), grid) : grid;
  });
  find("grids").replaceChildren(...grids);
  const axes = state.what === "profile" ? "Mean score by distance." : "Query down, key across.";
  const several = state.sides.some((side) => side.layers.length > 1);
  const placed = several ? `${axes} A row per layer, a column per head.` : axes;
  find("order-note").textContent = MEASURES[state.order] ? MEASURES[state.order].note : placed;
  markHead();
}

function headButton({ layer, head, measure }) {
  const canvas = make("canvas");
  const scale = scaleFor(layer, head);
  if (layer.matrix) {
    const { rows, columns, value } = small(layer, head);
    paint(canvas, columns, rows, scale, value);
  } else {
    spark(canvas, layer.profile.mean(head), scale);
  }
  const name = `Layer ${layer.layer + 1}${layer.label && ` (${layer.label})`}, head ${head + 1}`;
  const sorted = measure === undefined ? "" : `, ${state.order} ${formatNumber(measure, 3)}`;
  const named = { ariaLabel: name + sorted, title: name + sorted };
  const button = make("button", { type: "button", className: "head", tabIndex: -1, ...named }, canvas);
  if (measure !== undefined) {
    const where = make("span", {}, `${layer.layer + 1}·${head + 1}`);
    button.append(make("span", { className: "label" }, where, " ", make("b", {}, formatNumber(measure, 2))));
    button.dataset.measure = measure;
  }
  Object.assign(button.dataset, { layer: layer.layer, head, low: scale.low, high: scale.high });
  button.addEventListener("click", () => choose(layer.layer, head));
  return button;
}

/** A profile as a line. */
function spark(canvas, mean, scale) {
  const [size, edge] = [SMALL, 8];
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  context.strokeStyle = colour("--accent");
  context.lineWidth = 3;
  context.beginPath();
  for (let x = 0; x < size; x++) {
    const y = mean[Math.round((x * (mean.length - 1)) / (size - 1))];
    const share = (y - scale.low) / (scale.high - scale.low);
    if (!Number.isNaN(y)) context.lineTo(x, size - edge - share * (size - 2 * edge));
  }
  context.stroke();
}

/** Show which head is enlarged; it alone is in the way of the Tab key. */
function markHead() {
  for (const grid of document.querySelectorAll(".grid")) {
    const buttons = [...grid.querySelectorAll("button.head")];
    let some = false;
    for (const button of buttons) {
      const here = Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head;
      button.ariaPressed = String(here);
      button.tabIndex = here ? 0 : -1;
      some ||= here;
    }
    if (!some && buttons.length) buttons[0].tabIndex = 0;
  }
}

/** Arrow keys walk over the grid as it is seen. */
function walkOverview(event) {
  const button = event.target.closest("button.head");
  if (!button) return;
  const grid = button.closest(".grid");
  const buttons = [...grid.querySelectorAll("button.head")];
  const tops = buttons.map((one) => one.offsetTop);
  const across = tops.filter((top) => top === tops[0]).length;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across };
  const place = buttons.indexOf(button);
  const next = { Home: 0, End: buttons.length - 1 }[event.key] ?? place + (steps[event.key] ?? NaN);
  if (!(next >= 0 && next < buttons.length)) return;
  event.preventDefault();
  buttons[next].focus();
  buttons[next].click();
}
