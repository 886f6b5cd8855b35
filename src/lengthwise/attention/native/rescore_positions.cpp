// Attention with contextual positions: scores = A + B + q . e(position), positions counted over gates from the right.
//
// Heads are apart: one piece of work is a block of rows of one head, backward all rows of one key head. Keys are walked
// from the right; backward from the right as far as gates count, and then from the left, which is how gradients of
// positions reach the gates. Beyond the last position nothing is left of all this but a constant.

#include "rescore.h"

namespace {

constexpr long ROWS = 48;
static_assert(ROWS <= MOST_ROWS, "Seen has room for so many");

inline v8 sigmoid(v8 x) {
  const v8 minus = pick(x < -80.0f, all(80.0f), -x);
  return 1.0f / (1.0f + exponential(minus));
}

// Running sums of eight lanes from the right or from the left, on from `total`, each rounded once.
inline v8 sums_from_right(v8 x, double& total) {
  v8 out;
  for (int lane = 7; lane >= 0; --lane) out[lane] = float(total += x[lane]);
  return out;
}

inline v8 sums_from_left(v8 x, double& total) {
  v8 out;
  for (int lane = 0; lane < 8; ++lane) out[lane] = float(total += x[lane]);
  return out;
}

// Where the keys of a block stand for one row, between which two columns of the table, and what that adds to a score.
struct Places {
  bool beyond;  // all of them at the last position: no gate in this block or to its left has a gradient
  alignas(32) float gate[COLUMNS], part[COLUMNS], rise[COLUMNS], added[COLUMNS];
  alignas(32) int32_t below[COLUMNS], above[COLUMNS];

  // `counted` is the sum of the gates to the right, in float64: a position is rounded once, however long the row.
  void take(const float* content, const int32_t* seen, const float* of_table, long positions, double& counted) {
    const float last = float(positions - 1);
    beyond = counted >= last;
    if (beyond) {
      for (long j = 0; j < COLUMNS; j += 8) store(added + j, all(of_table[positions - 1]));
      return;
    }
    for (long j = COLUMNS - 8; j >= 0; j -= 8) {
      const v8 gates = lanes_and(sigmoid(load(content + j)), seen + j);
      v8 position = sums_from_right(gates, counted);
      position = pick(position > last, all(last), position);
      i8 whole = __builtin_convertvector(position, i8);
      whole &= (whole >= 0) & (whole < (int32_t)positions);  // a NaN has no column
      const v8 w = position - __builtin_convertvector(whole, v8);
      const i8 next = whole - (w > 0.0f);
      v8 from, to;
      for (int lane = 0; lane < 8; ++lane) {
        from[lane] = of_table[whole[lane]];
        to[lane] = of_table[next[lane]];
      }
      const v8 up = to - from;
      store(gate + j, gates);
      store(part + j, w);
      store(rise + j, up);
      store(added + j, pick(w < 0.5f, from + w * up, to - up * (1.0f - w)));
      std::memcpy(below + j, &whole, sizeof whole);
      std::memcpy(above + j, &next, sizeof next);
    }
  }

  static void count(const float* content, const int32_t* seen, double& counted) {
    for (long j = COLUMNS - 8; j >= 0; j -= 8)
      sums_from_right(lanes_and(sigmoid(load(content + j)), seen + j), counted);
  }

  // From the gradient of scores to that of content, by its gate too; `risen` is the sum of positions' gradients so far.
  void take_back(float* d, float* d_of_table, long positions, double& risen) const {
    if (beyond) {
      v8 total = all(0);
      for (long j = 0; j < COLUMNS; j += 8) total += load(d + j);
      d_of_table[positions - 1] += sum(total);
      return;
    }
    for (long j = 0; j < COLUMNS; j += 8) {
      const v8 own = load(d + j), w = load(part + j), g = load(gate + j);
      const v8 upper = own * w, lower = own - upper;
      for (int lane = 0; lane < 8; ++lane) {
        d_of_table[below[j + lane]] += lower[lane];
        d_of_table[above[j + lane]] += upper[lane];
      }
      const v8 of_gate = sums_from_left(own * load(rise + j), risen);
      store(d + j, own + of_gate * (g * (1.0f - g)));
    }
  }
};

// A block of rows of one head, as both passes see it.
struct PositionRows {
  const Task& p;
  long s, h, index, kv, row, rows;
  Seen seen;
  std::vector<float> scaled, of_table, content;
  std::vector<int32_t> visible;
  std::vector<float> bias;
  Places places;

  PositionRows(const Task& task, long sequence, long head, long first)
      : p(task), s(sequence), h(head), index(s * task.heads + head), kv(index / task.group), row(first),
        rows(std::min(ROWS, task.row_to - first)), seen(task, sequence, first, rows), scaled(rows * task.dim),
        of_table(rows * task.position_channels), content(rows * COLUMNS), visible(rows * COLUMNS), bias(COLUMNS) {
    scale_into(scaled.data(), queries(), rows * p.dim, p.scale);
    product<false>(queries(), p.dim, p.table, p.position_channels, PANEL, of_table.data(), p.position_channels, rows,
                   p.position_channels, p.dim, false);
  }

  const float* queries() const { return p.q + (index * p.queries + row) * p.dim; }
  long first_block() const { return seen.from / COLUMNS; }
  long end_block() const { return seen.from < seen.to ? blocks_of(seen.to) : 0; }
  long count(long column) const { return std::min(COLUMNS, seen.to - column); }

  void take(long column, const float* packed) {
    const long needed = (count(column) + PANEL - 1) / PANEL * PANEL;
    product<false>(scaled.data(), p.dim, packed, PANEL, PANEL * p.dim, content.data(), COLUMNS, rows, needed, p.dim, false);
    for (long r = 0; r < rows; ++r) {
      seen.fill(r, column, &visible[r * COLUMNS]);
      finish_content(p, &content[r * COLUMNS], &visible[r * COLUMNS]);
    }
  }

  // Scores of a row before its logit scale, from its content; whatever lies there where hidden.
  void score(long r, long column, double& counted, float* to) {
    const float* a = &content[r * COLUMNS];
    places.take(a, &visible[r * COLUMNS], &of_table[r * p.position_channels], p.positions, counted);
    if (p.kind != NONE) fill_bias(p, s, h, row + r, column, bias.data());
    for (long j = 0; j < COLUMNS; j += 8) store(to + j, load(a + j) + load(&bias[j]) + load(places.added + j));
  }
};

void positions_forward(const Task& p, long s, long h, long row, const float* packed) {
  PositionRows block(p, s, h, row);
  const long rows = block.rows, size = COLUMNS * p.dim;
  std::vector<float> scores(rows * COLUMNS), summed(rows * p.value), scratch(packed ? 0 : size);
  std::vector<Softmax> softmax(rows);
  std::vector<double> counted(rows);
  for (long r = 0; r < rows; ++r) softmax[r].begin(p.sink ? p.sink + block.index * p.queries + row + r : nullptr);
  for (long b = block.end_block() - 1; b >= block.first_block(); --b) {
    const long column = b * COLUMNS;
    const float* keys = packed ? packed + (block.kv * blocks_of(p.keys) + b) * size : scratch.data();
    if (!packed) pack(p.k + block.kv * p.keys * p.dim, p.dim, p.keys, column, scratch.data());
    block.take(column, keys);
    for (long r = 0; r < rows; ++r) {
      float* own = &scores[r * COLUMNS];
      if (!block.seen.any(r, column, COLUMNS)) {
        std::fill(own, own + COLUMNS, 0.0f);
        continue;
      }
      block.score(r, column, counted[r], own);
      const float factor = factor_of(p, block.index, row + r);
      for (long j = 0; j < COLUMNS; j += 8)
        store(own + j, pick(seen_at(&block.visible[r * COLUMNS + j]), load(own + j) * factor, all(-INF)));
      fade(&summed[r * p.value], p.value, softmax[r].add(own));
    }
    product<false>(scores.data(), COLUMNS, p.v + (block.kv * p.keys + column) * p.value, p.value, PANEL, summed.data(),
                   p.value, rows, p.value, block.count(column), true);
  }
  for (long r = 0; r < rows; ++r) {
    const long at = block.index * p.queries + row + r;
    softmax[r].end(p, at, &summed[r * p.value]);
  }
}

// One block of rows; keys are walked twice: from the right as far as gates count, then from the left for everything.
void positions_backward(const Task& p, long s, long h, long row, const float* k_panels, const float* v_panels) {
  PositionRows block(p, s, h, row);
  const long rows = block.rows, first = block.first_block(), end = block.end_block(), channels = p.position_channels;
  const float *d_out = p.d_out + (block.index * p.queries + row) * p.value, *k = p.k + block.kv * p.keys * p.dim;
  std::vector<double> counts, counted(rows), risen(rows);  // counts: of the gates to the right of a block, by block and row
  long near = end;
  for (bool counting = true; counting && near > first;) {
    --near;
    counts.insert(counts.end(), counted.begin(), counted.end());
    block.take(near * COLUMNS, k_panels + near * COLUMNS * p.dim);
    counting = false;
    for (long r = 0; r < rows; ++r) {
      Places::count(&block.content[r * COLUMNS], &block.visible[r * COLUMNS], counted[r]);
      counting = counting || (block.seen.low[r] < near * COLUMNS && !(counted[r] >= p.positions - 1));
    }
  }
  std::vector<float> weights(rows * COLUMNS), d_content(rows * COLUMNS), d_of_table(rows * channels);
  std::vector<float> d_bias(p.learned ? rows * COLUMNS : 0);
  float* d_q = p.d_q + (block.index * p.queries + row) * p.dim;
  const float cap = p.softcap > 0 ? float(1 / p.softcap) : 0;
  for (long b = first; b < end; ++b) {
    const long column = b * COLUMNS, count = block.count(column), needed = (count + PANEL - 1) / PANEL * PANEL;
    block.take(column, k_panels + b * COLUMNS * p.dim);
    product<false>(d_out, p.value, v_panels + b * COLUMNS * p.value, PANEL, PANEL * p.value, d_content.data(), COLUMNS, rows,
                   needed, p.value, false);
    for (long r = 0; r < rows; ++r) {
      float *w = &weights[r * COLUMNS], *d = &d_content[r * COLUMNS];
      if (!block.seen.any(r, column, COLUMNS)) {
        std::fill(w, w + COLUMNS, 0.0f);
        std::fill(d, d + COLUMNS, 0.0f);
        if (p.learned) std::fill(&d_bias[r * COLUMNS], &d_bias[r * COLUMNS] + COLUMNS, 0.0f);
        continue;
      }
      double before = b < near ? double(p.positions) : counts[(end - 1 - b) * rows + r];
      block.score(r, column, before, w);
      const long at = block.index * p.queries + row + r;
      const float factor = factor_of(p, block.index, row + r), most = p.most[at], share = 1 / p.total[at],
                    drop = p.delta[at], centre = centre_of(p, at);
      v8 way = all(0);
      for (long j = 0; j < COLUMNS; j += 8) {
        const i8 seen = seen_at(&block.visible[r * COLUMNS + j]);
        const v8 score = load(w + j), weight = exponential(pick(seen, score * factor - most, all(-INF))) * share;
        const v8 own = (v8)((i8)(weight * (load(d + j) - drop)) & seen);
        store(w + j, weight);
        store(d + j, own * factor);
        way += (v8)((i8)(own * (score - centre)) & seen);
      }
      if (p.d_logit_scale) p.d_logit_scale[at] += sum(way);
      if (p.learned) std::memcpy(&d_bias[r * COLUMNS], d, COLUMNS * sizeof(float));
      block.places.take_back(d, &d_of_table[r * channels], p.positions, risen[r]);
      for (long j = 0; cap > 0 && j < COLUMNS; j += 8) {
        const v8 capped = load(&block.content[r * COLUMNS + j]) * cap;
        store(d + j, load(d + j) * (1.0f - capped * capped));
      }
      for (long j = 0; j < COLUMNS; j += 8) store(d + j, lanes_and(load(d + j), &block.visible[r * COLUMNS + j]));
    }
    product<true>(weights.data(), COLUMNS, d_out, p.value, PANEL, p.d_v + (block.kv * p.keys + column) * p.value, p.value,
                  count, p.value, rows, true);
    product<true>(d_content.data(), COLUMNS, block.scaled.data(), p.dim, PANEL, p.d_k + (block.kv * p.keys + column) * p.dim,
                  p.dim, count, p.dim, rows, true);
    product<false>(d_content.data(), COLUMNS, k + column * p.dim, p.dim, PANEL, d_q, p.dim, rows, p.dim, count, true);
    if (p.learned) collect_bias(p, s, h, 0, row, rows, column, d_bias.data(), COLUMNS);
  }
  scale_into(d_q, d_q, rows * p.dim, p.scale);
  product<false>(d_of_table.data(), channels, p.table_t, p.dim, PANEL, d_q, p.dim, rows, p.dim, channels, true);
  product<true>(block.queries(), p.dim, d_of_table.data(), channels, PANEL, p.d_table + block.index * p.dim * channels,
                channels, p.dim, channels, rows, true);
}

}  // namespace

extern "C" {

void lengthwise_positions_forward(const Task* p) {
  const long blocks = (p->row_to - p->row_from + ROWS - 1) / ROWS;
  const std::vector<float> packed = blocks > 1 ? pack_all(*p, p->k, p->dim, 0) : std::vector<float>();
  share(p->threads, p->batch * p->heads * blocks, [&](long n) {
    const long head = n / blocks, row = p->row_from + n % blocks * ROWS;
    positions_forward(*p, head / p->heads, head % p->heads, row, blocks > 1 ? packed.data() : nullptr);
  });
}

// One thread has all rows of a key head to itself, so that their sums over rows have one order.
void lengthwise_positions_backward(const Task* p) {
  const long kv_heads = p->heads / p->group, blocks = blocks_of(p->keys);
  const std::vector<float> k = pack_all(*p, p->k, p->dim, 0), v = pack_all(*p, p->v, p->value, 0);
  share(p->threads, p->batch * kv_heads, [&](long n) {
    for (long h = 0; h < p->group; ++h)
      for (long row = p->row_from; row < p->row_to; row += ROWS)
        positions_backward(*p, n / kv_heads, n % kv_heads * p->group + h, row, k.data() + n * blocks * COLUMNS * p->dim,
                           v.data() + n * blocks * COLUMNS * p->value);
  });
}

}
