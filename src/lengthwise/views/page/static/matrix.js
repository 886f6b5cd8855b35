"use strict";
// One head's numbers by query and key, whatever they are made from. NaN is where a query may not look.
// at(head, i, j) is the number of a pair, or its tile's mean where only tiles are known.

const round = Math.fround;

const openLayers = new WeakMap();

/** A layer of a view, ready to be read; opened once. */
function openLayer(layer) {
  if (!openLayers.has(layer)) openLayers.set(layer, readLayer(layer));
  return openLayers.get(layer);
}

async function readLayer(layer) {
  const matrix = layer.matrix && (await openMatrix(layer));
  const profile = await openProfile(layer, matrix);
  const kernel = layer.kernel && (await numbers(layer.kernel));
  return { ...layer, matrix, profile, kernel, pool: (layer.matrix && layer.matrix.pool) || 1 };
}

async function openMatrix(layer) {
  const { queries, keys, causal } = layer;
  const may = causal ? (i, j) => j <= i + keys - queries : () => true;
  const made = await KINDS[layer.matrix.kind](layer.matrix, layer);
  // Parts of which every number is known, the newest first: whole heads from the file, parts of them from a server.
  const parts = Array.from({ length: layer.heads }, () => []);
  for (const [head, cells] of Object.entries(layer.detail)) {
    parts[head].push({ i: 0, j: 0, rows: queries, columns: keys, cells: await numbers(cells) });
  }
  const known = (head, i, j) =>
    parts[head].find((p) => i >= p.i && i < p.i + p.rows && j >= p.j && j < p.j + p.columns);
  return {
    at(head, i, j) {
      if (!may(i, j)) return NaN;
      const part = parts[head].length ? known(head, i, j) : undefined;
      return part ? part.cells[(i - part.i) * part.columns + j - part.j] : made.at(head, i, j);
    },
    single: (head, i, j) => !made.bounds || known(head, i, j) !== undefined,
    onlyTiles: (head) => Boolean(made.bounds) && !parts[head].length,
    /** The least and the greatest of the tile, once openBounds was awaited. */
    bounds: (head, i, j) => made.bounds(head, i, j),
    openBounds: made.openBounds || (async () => {}),
    learn(head, part) {
      parts[head] = [part, ...parts[head]].slice(0, KEPT);
    },
  };
}

const KEPT = 8;

const KINDS = {
  async tiles(said, { heads, queries, keys }) {
    const pool = said.pool;
    const [rows, columns] = [Math.ceil(queries / pool), Math.ceil(keys / pool)];
    const mean = await numbers(said.mean);
    const place = (head, i, j) => (head * rows + Math.floor(i / pool)) * columns + Math.floor(j / pool);
    const at = (head, i, j) => mean[place(head, i, j)];
    if (pool === 1) return { at };
    let [least, greatest] = [];
    return {
      at,
      bounds: (head, i, j) => [least[place(head, i, j)], greatest[place(head, i, j)]],
      async openBounds() {
        [least, greatest] = await Promise.all([numbers(said.least), numbers(said.greatest)]);
      },
    };
  },

  async distance(said) {
    const table = await numbers(said.table);
    const length = said.table.shape[1];
    const [query, key] = [await positions(said.query), await positions(said.key)];
    return {
      at(head, i, j) {
        const place = query(i) - key(j) - said.first;
        return table[head * length + Math.min(Math.max(place, 0), length - 1)];
      },
    };
  },

  async level(said) {
    const { query, key, slope } = await levels(said);
    return { at: (head, i, j) => round(-slope(head, i) * round(Math.abs(query(head, i) - key(head, j)))) };
  },

  async line(said) {
    const curve = await KINDS.distance(said.curve);
    const parts = [said.factor, said.knots, said.slope, said.intercept];
    const [factor, knots, slope, intercept] = await Promise.all(parts.map(numbers));
    return {
      at(head, i, j) {
        const x = round(factor[i] * curve.at(0, i, j));
        let line = 0;
        while (line < knots.length && knots[line] <= x) line++;
        const place = head * (knots.length + 1) + line;
        return slope[place] * x + intercept[place];
      },
    };
  },

  async function(said) {
    return { at: await FUNCTIONS[said.function](said) };
  },
};

/** The functions of encodings that are neither a table nor a level; payload.py names them. */
const FUNCTIONS = {
  async "k-cable"(said) {
    const { query, key, slope } = await levels(said);
    return (head, i, j) => {
      const way = round(query(head, i) - key(head, j));
      return -slope(head, i) * Math.log1p(way * way);
    };
  },

  async "kerple-log"(said) {
    const [distance, [p, a]] = await kernel(said);
    return (head, i, j) => -p[head] * Math.log1p(a[head] * distance(i, j));
  },

  async "kerple-power"(said) {
    const [distance, [p, a]] = await kernel(said);
    return (head, i, j) => (distance(i, j) ? -a[head] * distance(i, j) ** p[head] : 0);
  },

  async fire(said) {
    const [distance, [furthest, c, limit, into, intoBias, out, outBias]] = await kernel(said);
    const rate = Math.abs(c[0]);
    const units = into.length;
    return (head, i, j) => {
      const scope = Math.log1p(rate * Math.max(furthest[i], limit[0])) + 1e-6;
      const x = Math.log1p(rate * distance(i, j)) / scope;
      let sum = outBias[head];
      for (let u = 0; u < units; u++) sum += out[head * units + u] * Math.max(0, into[u] * x + intoBias[u]);
      return sum;
    };
  },
};

async function kernel(said) {
  const [query, key] = [await positions(said.query), await positions(said.key)];
  return [(i, j) => Math.abs(query(i) - key(j)), await Promise.all(said.tensors.map(numbers))];
}

async function positions(said) {
  if (typeof said === "number") return (i) => i + said;
  const found = await numbers(said);
  return (i) => found[i];
}

/** Levels and slopes by head and token; one head, or one token, stands for all. */
async function levels(said) {
  const one = async (packed) => {
    const values = await numbers(packed);
    const [heads, tokens] = packed.shape;
    return (head, i) => values[(heads === 1 ? 0 : head) * tokens + (tokens === 1 ? 0 : i)];
  };
  return { query: await one(said.query), key: await one(said.key || said.query), slope: await one(said.slope) };
}

/** Mean and spread by distance; read off the last row where only distance matters. */
async function openProfile(layer, matrix) {
  if (layer.profile) {
    const [mean, spread] = await Promise.all([numbers(layer.profile.mean), numbers(layer.profile.spread)]);
    const length = layer.profile.mean.shape[1];
    const part = (x) => (head) => x.subarray(head * length, (head + 1) * length);
    return { first: layer.profile.first, length, mean: part(mean), spread: part(spread) };
  }
  const { queries, keys } = layer;
  const rows = new Map();
  const mean = (head) => {
    if (!rows.has(head)) {
      const at = (_, distance) => matrix.at(head, queries - 1, keys - 1 - distance);
      rows.set(head, Float32Array.from({ length: keys }, at));
    }
    return rows.get(head);
  };
  return { first: 0, length: keys, mean, spread: () => null };
}
