"use strict";
// One head's numbers by query and key, whatever they are filled from. NaN where attention is masked.
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
  const isTiled = layer.matrix?.kind === "tiles";
  return { ...layer, matrix, profile, kernel, isTiled, pool: (isTiled && layer.matrix.pool) || 1 };
}

async function openMatrix(layer) {
  const { queries, keys, causal } = layer;
  const visible = causal ? (i, j) => j <= i + keys - queries : () => true;
  const filled = await KINDS[layer.matrix.kind](withTwins(layer.matrix), layer);
  // Parts of which every number is known, newest first: whole heads from the file, parts of them from a server.
  const parts = Array.from({ length: layer.heads }, () => []);
  for (const [head, cells] of Object.entries(layer.detail)) {
    parts[head].push({ i: 0, j: 0, rows: queries, columns: keys, cells: await numbers(cells) });
  }
  const known = (head, i, j) =>
    parts[head].find((p) => i >= p.i && i < p.i + p.rows && j >= p.j && j < p.j + p.columns);
  return {
    at(head, i, j) {
      if (!visible(i, j)) return NaN;
      const part = parts[head].length ? known(head, i, j) : undefined;
      return part ? part.cells[(i - part.i) * part.columns + j - part.j] : filled.at(head, i, j);
    },
    /** The mean of a pair's tile, or its own number where there are no tiles. */
    tile: (head, i, j) => (visible(i, j) ? filled.at(head, i, j) : NaN),
    single: (head, i, j) => !filled.bounds || known(head, i, j) !== undefined,
    /** Whether every pair of a window has its own number. */
    allSingle: (head, w) => !filled.bounds || parts[head].some((p) => contains(p, w)),
    someSingle: (head, w) => !filled.bounds || parts[head].some((p) => overlaps(p, w)),
    onlyTiles: (head) => Boolean(filled.bounds) && !parts[head].length,
    /** The least and the greatest of the tile, once openBounds was awaited. */
    bounds: (head, i, j) => filled.bounds(head, i, j),
    openBounds: filled.openBounds || (async () => {}),
    learn(head, part) {
      parts[head] = [part, ...parts[head]].slice(0, KEPT);
    },
  };
}

const contains = (p, w) =>
  p.i <= w.i && p.j <= w.j && w.i + w.rows <= p.i + p.rows && w.j + w.columns <= p.j + p.columns;
const overlaps = (p, w) =>
  p.i < w.i + w.rows && w.i < p.i + p.rows && p.j < w.j + w.columns && w.j < p.j + p.columns;

/** A tensor that is sent as a name is the tensor of that name. */
function withTwins(description) {
  const tensors = { ...description.tensors };
  for (const [name, packed] of Object.entries(tensors)) {
    if (typeof packed === "string") tensors[name] = description.tensors[packed];
  }
  return { ...description, tensors };
}

const KEPT = 8;

const KINDS = {
  async tiles(tiles, { queries, keys }) {
    const pool = tiles.pool;
    const [rows, columns] = [Math.ceil(queries / pool), Math.ceil(keys / pool)];
    const mean = await numbers(tiles.mean);
    const place = (head, i, j) => (head * rows + Math.floor(i / pool)) * columns + Math.floor(j / pool);
    const at = (head, i, j) => mean[place(head, i, j)];
    if (pool === 1) return { at };
    let [least, greatest] = [];
    return {
      at,
      bounds: (head, i, j) => [least[place(head, i, j)], greatest[place(head, i, j)]],
      async openBounds() {
        [least, greatest] = await Promise.all([numbers(tiles.least), numbers(tiles.greatest)]);
      },
    };
  },

  async DistanceBias({ tensors, static: plain }) {
    const table = await numbers(tensors.table);
    const length = tensors.table.shape[1];
    const [query, key] = [await positions(tensors.query), await positions(tensors.key)];
    return {
      at(head, i, j) {
        const place = query(i) - key(j) - plain.first;
        return table[head * length + Math.min(Math.max(place, 0), length - 1)];
      },
    };
  },

  async QueryDistanceBias({ tensors, static: plain }) {
    const [rows, profiles] = [await numbers(tensors.rows), await numbers(tensors.profiles)];
    const [, rowHeads, tokens, count] = tensors.rows.shape;
    const [profileHeads, , length] = tensors.profiles.shape;
    const [query, key] = [await positions(tensors.query), await positions(tensors.key)];
    return {
      at(head, i, j) {
        const place = query(i) - key(j) - plain.first;
        const column = Math.min(Math.max(place, 0), length - 1);
        if (plain.beyond === "zero" && column !== place) return 0;
        const own = ((rowHeads > 1 ? head : 0) * tokens + (plain.side === "query" ? i : j)) * count;
        const curve = (profileHeads > 1 ? head : 0) * count * length + column;
        let sum = 0;
        for (let n = 0; n < count; n++) sum += rows[own + n] * profiles[curve + n * length];
        return sum;
      },
    };
  },

  async LevelBias({ tensors, static: plain }) {
    const { query_level: query, key_level: key, slope } = await levels(tensors);
    const curve = LEVEL_CURVES[plain.curve];
    return { at: (head, i, j) => round(-slope(head, i) * curve(round(query(head, i) - key(head, j)))) };
  },

  async LineBias(description) {
    const curve = await KINDS.DistanceBias(nested(description, "curve"));
    const parts = ["factor", "knots", "slope", "intercept"].map((name) => numbers(description.tensors[name]));
    const [factor, knots, slope, intercept] = await Promise.all(parts);
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

  async FunctionBias(description) {
    return { at: await FUNCTIONS[description.static.function](description) };
  },

  async SumBias(description) {
    const terms = [];
    for (let n = 0; `terms.${n}.kind` in description.static; n++) {
      terms.push(await KINDS[description.static[`terms.${n}.kind`]](nested(description, `terms.${n}`)));
    }
    return { at: (head, i, j) => terms.reduce((sum, term) => sum + term.at(head, i, j), 0) };
  },
};

/** A description inside another: what stands under its name and a dot. */
function nested(description, name) {
  const under = (parts) =>
    Object.fromEntries(
      Object.entries(parts)
        .filter(([path]) => path.startsWith(`${name}.`))
        .map(([path, value]) => [path.slice(name.length + 1), value]),
    );
  return { tensors: under(description.tensors), static: under(description.static) };
}

/** What becomes of a difference of levels. */
const LEVEL_CURVES = {
  linear: Math.abs,
  log1p_square: (difference) => Math.log1p(difference * difference),
};

/** The functions of encodings that are neither a table nor a level; payload.py names them. */
const FUNCTIONS = {
  async "lengthwise.encodings.kerple.kerple_log"(description) {
    const [distance, [p, a]] = await kernel(description);
    return (head, i, j) => -p[head] * Math.log1p(a[head] * distance(i, j));
  },

  async "lengthwise.encodings.kerple.kerple_power"(description) {
    const [distance, [p, a]] = await kernel(description);
    return (head, i, j) => (distance(i, j) ? -a[head] * distance(i, j) ** p[head] : 0);
  },

  async "lengthwise.encodings.fire.fire_tile"(description) {
    const [distance, [scopes, c, limit, into, intoBias, out, outBias]] = await kernel(description);
    const rate = Math.abs(c[0]);
    const units = into.length;
    const furthest = typeof scopes === "function" ? scopes : (i) => scopes[i];
    return (head, i, j) => {
      const scope = Math.log1p(rate * Math.max(furthest(i), limit[0])) + 1e-6;
      const x = Math.log1p(rate * distance(i, j)) / scope;
      let sum = outBias[head];
      for (let u = 0; u < units; u++) sum += out[head * units + u] * Math.max(0, into[u] * x + intoBias[u]);
      return sum;
    };
  },
};

/** The distance of two tokens, and the arguments of a function behind its positions. */
async function kernel({ tensors }) {
  const [query, key] = [await positions(tensors["arguments.0"]), await positions(tensors["arguments.1"])];
  const rest = [];
  for (let n = 2; `arguments.${n}` in tensors; n++) {
    const packed = tensors[`arguments.${n}`];
    rest.push(typeof packed === "number" ? await positions(packed) : await numbers(packed));
  }
  return [(i, j) => Math.abs(query(i) - key(j)), rest];
}

async function positions(packed) {
  if (typeof packed === "number") return (i) => i + packed;
  const all = await numbers(packed);
  return (i) => all[i];
}

/** Levels and slopes by head and token; one head, or one token, stands for all. */
async function levels(tensors) {
  const one = async (packed) => {
    const values = await numbers(packed);
    const [heads, tokens] = packed.shape.slice(-2);
    return (head, i) => values[(heads === 1 ? 0 : head) * tokens + (tokens === 1 ? 0 : i)];
  };
  const names = ["query_level", "key_level", "slope"];
  const opened = await Promise.all(names.map((name) => one(tensors[name])));
  return Object.fromEntries(names.map((name, n) => [name, opened[n]]));
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
