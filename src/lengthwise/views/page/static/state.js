"use strict";
// The state of the page, and what follows from it.

const state = {
  models: [],
  sides: [],
  what: "bias",
  layer: 0,
  head: 0,
  cursor: { i: 0, j: 0 },
  held: false,
  window: null,
  shared: false,
  order: "place",
  log: false,
};
// A side is { model, snapshot } and, once opened, its layers of the present view.

const snapshotOf = (side) => state.models[side.model].snapshots[side.snapshot];
const nameOf = (side) => {
  const { encoding, name } = state.models[side.model];
  const { step } = snapshotOf(side);
  return `${encoding}, ${name}${step === null ? "" : `, step ${step.toLocaleString("en")}`}`;
};
const layersOf = (side) => snapshotOf(side).views[state.what] || [];

/** The opened layer of a side that is enlarged, or undefined where that model has none. */
const currentLayer = (side) => (side.layers || []).find((one) => one.layer === state.layer && state.head < one.heads);

/** Open the present view of every side. */
async function openSides() {
  for (const side of state.sides) {
    side.layers = await Promise.all(layersOf(side).map(openLayer));
  }
}

const ranges = new WeakMap();

/** The least and the greatest number of a head: of its single cells, or of its tiles' means as in the figures. */
function rangeOf(layer, head, single) {
  if (single || layer.pool === 1) return layer.range[head];
  if (!ranges.has(layer)) ranges.set(layer, []);
  const known = ranges.get(layer);
  known[head] ||= tileRange(layer, head);
  return known[head];
}

function tileRange(layer, head) {
  const { rows, columns, value } = small(layer, head);
  let [low, high] = [Infinity, -Infinity];
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++) {
      const mean = value(y, x);
      if (mean < low) low = mean;
      if (mean > high) high = mean;
    }
  }
  return [low, high];
}

const SMALL = 96;

/** A head in small: its tiles, or of a described form some rows and columns, both ends among them. */
function small(layer, head) {
  const { queries, keys, pool, matrix } = layer;
  if (pool > 1 || layer.isTiled || (queries <= SMALL && keys <= SMALL)) {
    const value = (y, x) => matrix.tile(head, Math.min(y * pool + pool - 1, queries - 1), x * pool);
    return { rows: Math.ceil(queries / pool), columns: Math.ceil(keys / pool), value };
  }
  const [rows, columns] = [Math.min(SMALL, queries), Math.min(SMALL, keys)];
  const spread = (place, count, length) => (count === 1 ? 0 : Math.round((place * (length - 1)) / (count - 1)));
  return { rows, columns, value: (y, x) => matrix.at(head, spread(y, rows, queries), spread(x, columns, keys)) };
}

/** The colours of a head: its own range, or that of all heads on the page; weights by their logarithm. */
function scaleFor(layer, head, single = false) {
  const log = state.what === "weights";
  if (!state.shared) return scaleOf(...rangeOf(layer, head, single), log);
  const all = state.sides.flatMap(sharedRanges);
  return scaleOf(Math.min(...all.map((range) => range[0])), Math.max(...all.map((range) => range[1])), log);
}

/** The range of every head of a side, by single cells where there are some or a server has them. */
function sharedRanges(side) {
  const every = (layer) => Array.from({ length: layer.heads }, (_, head) => head);
  const single = (layer, head) => Boolean(snapshotOf(side).look) || head in layer.detail;
  return side.layers.flatMap((layer) => every(layer).map((head) => rangeOf(layer, head, single(layer, head))));
}

/** How much a head's mean falls whenever the distance doubles: least squares against the logarithm of 1 + distance. */
function steepness(layer, head) {
  let [n, sx, sy, sxx, sxy] = [0, 0, 0, 0, 0];
  layer.profile.mean(head).forEach((y, place) => {
    const distance = layer.profile.first + place;
    if (distance < 0 || Number.isNaN(y)) return;
    const x = Math.log2(1 + distance);
    n += 1;
    sx += x;
    sy += y;
    sxx += x * x;
    sxy += x * y;
  });
  return n < 2 ? 0 : -(n * sxy - sx * sy) / (n * sxx - sx * sx);
}

/** The mean distance that a head looks at by its mean alone: under the weights, or the softmax of anything else. */
function reach(layer, head) {
  const mean = layer.profile.mean(head);
  const top = mean.reduce((a, b) => (b > a ? b : a), -Infinity);
  let [all, far] = [0, 0];
  mean.forEach((y, place) => {
    if (Number.isNaN(y)) return;
    const weight = state.what === "weights" ? y : Math.exp(y - top);
    all += weight;
    far += weight * Math.abs(layer.profile.first + place);
  });
  return all ? far / all : 0;
}

const MEASURES = {
  steepness: { of: steepness, note: "Steepness: how much the mean falls when the distance doubles." },
  reach: { of: reach, note: "Reach: the mean distance that a head sees by its mean at each distance alone." },
  context: {
    of: (layer, head) => (layer.context[head] === null ? NaN : layer.context[head]),
    note: "Context-dependence: the spread over sequences at the same query and key; 0 where tokens do not matter.",
  },
  asymmetry: {
    of: (layer, head) => (layer.asymmetry ? (layer.asymmetry[head] ?? NaN) : NaN),
    note: "Asymmetry: how far left and right of the diagonal differ, from 0 to 1; only where both are seen.",
  },
};

/** Layers and heads of a side in the order asked for, each with the measure it is sorted by. */
function ordered(side) {
  const all = side.layers.flatMap((layer) => Array.from({ length: layer.heads }, (_, head) => ({ layer, head })));
  const measure = MEASURES[state.order];
  if (!measure) return all;
  for (const one of all) one.measure = measure.of(one.layer, one.head);
  return all.sort((a, b) => (Number.isNaN(a.measure) - Number.isNaN(b.measure)) || b.measure - a.measure);
}
