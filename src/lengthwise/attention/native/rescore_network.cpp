// Attention whose scores a small network along the heads corrects: scores = A + B + f([A; B]).
//
// All heads of a sequence are needed at once: one piece of work is a block of rows, and keys are walked from the left.
// With a kernel of 3 each layer lags one key behind the one before it, so that nothing is computed twice at the edges
// of blocks. Backward, blocks of rows take turns at the gradients of a block of keys, in one order whatever the number
// of threads; everything else that they add to is one of STRANDS sums.

#include "rescore.h"

namespace {

constexpr long ROWS = 24;
constexpr long GROUP = 4;  // rows whose hidden layers are alive at once
constexpr float LEAK = 0.01f;
constexpr long ACROSS = MOST / 2 > 3 ? 4 : 2;  // columns of a block of sums: with four rows they fit into the registers
static_assert(ROWS <= MOST_ROWS, "Seen has room for so many");

// One layer of the network at 16 keys of a row: use(o, left, right) for every output o, from
//   start[o] + the sum over inputs and taps of w[tap][input][o] x[input][key + tap - TAPS / 2].
// Weights are tap x input x output; each tap is summed by itself first, which rounds less.
template <int TAPS, class Use>
inline void layer(const float* w, long outputs, long inputs, const float* x, const float* start, Use use) {
  in_blocks(outputs, [&](auto size, long first) {
    constexpr int M = size.value;
    v8 total[2][M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) total[0][m] = total[1][m] = all(start ? start[first + m] : 0);
    const float* weight = w + first;
    for (int tap = 0; tap < TAPS; ++tap) {
      const float* from = x + tap - TAPS / 2;
      v8 left[M], right[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) left[m] = right[m] = all(0);
      for (long i = 0; i < inputs; ++i, from += STRIDE, weight += outputs) {
        const v8 b0 = load(from), b1 = load(from + 8);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          left[m] += weight[m] * b0;
          right[m] += weight[m] * b1;
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        total[0][m] += left[m];
        total[1][m] += right[m];
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) use(first + m, total[0][m], total[1][m]);
  });
}

// A block of rows of all heads, as both passes see it: content and bias of a block of keys, hidden by row.
struct NetworkRows {
  const Task& p;
  long s, row, rows, heads, inputs;
  Seen seen;
  std::vector<float> scaled, x;  // q times scale; row x channel x key, content first
  std::vector<int32_t> visible;  // row x key
  std::vector<float> scratch;    // a block of keys in panels, where they were not packed before

  NetworkRows(const Task& task, long sequence, long first)
      : p(task), s(sequence), row(first), rows(std::min(ROWS, task.row_to - first)), heads(task.heads),
        inputs(task.input_channels), seen(task, sequence, first, rows), scaled(heads * rows * task.dim),
        x(rows * inputs * STRIDE), visible(rows * STRIDE) {
    for (long h = 0; h < heads; ++h)
      scale_into(&scaled[h * rows * p.dim], p.q + ((s * heads + h) * p.queries + row) * p.dim, rows * p.dim, p.scale);
  }

  float* channels(long r) { return &x[r * inputs * STRIDE + MARGIN]; }
  int32_t* lanes(long r) { return &visible[r * STRIDE + MARGIN]; }

  // Content and bias of the keys from `column` on.
  void take(long block, const float* packed) {
    const long column = block * COLUMNS, needed = std::min(COLUMNS, (seen.to - column + PANEL - 1) / PANEL * PANEL);
    const long kv_heads = heads / p.group, size = COLUMNS * p.dim;
    for (long kv = 0; needed > 0 && kv < kv_heads; ++kv) {
      const float* keys = packed ? packed + ((s * kv_heads + kv) * blocks_of(p.keys) + block) * size : nullptr;
      if (!keys) {
        scratch.resize(size);
        pack(p.k + (s * kv_heads + kv) * p.keys * p.dim, p.dim, p.keys, column, scratch.data());
        keys = scratch.data();
      }
      for (long h = kv * p.group; h < (kv + 1) * p.group; ++h)
        product<false>(&scaled[h * rows * p.dim], p.dim, keys, PANEL, PANEL * p.dim, channels(0) + h * STRIDE,
                       inputs * STRIDE, rows, needed, p.dim, false);
    }
    for (long r = 0; r < rows; ++r) {
      float* own = channels(r);
      int32_t* lane = lanes(r);
      seen.fill(r, column, lane);
      if (!seen.any(r, column, COLUMNS)) {
        for (long c = 0; c < 2 * heads; ++c) std::fill(own + c * STRIDE, own + c * STRIDE + COLUMNS, 0.0f);
        continue;
      }
      for (long h = 0; h < heads; ++h) {
        finish_content(p, own + h * STRIDE, lane);
        float* bias = own + (heads + h) * STRIDE;
        if (p.kind == NONE) continue;
        fill_bias(p, s, h, row + r, column, bias);
        for (long j = 0; j < COLUMNS; j += 8) store(bias + j, lanes_and(load(bias + j), lane + j));
      }
    }
  }

  // Hidden units of one row, one key behind with a kernel of 3; 0 where hidden.
  template <int TAPS>
  void hide(long r, long column, float* hidden) {
    constexpr long LAG = TAPS / 2;
    for (long j = -LAG; j < COLUMNS - LAG; j += PANEL) {
      if (!seen.any(r, column + j, PANEL)) {
        for (long o = 0; o < p.hidden_channels; ++o) {
          store(hidden + o * STRIDE + j, all(0));
          store(hidden + o * STRIDE + j + 8, all(0));
        }
        continue;
      }
      const int32_t* lane = lanes(r) + j;
      const i8 first = seen_at(lane), second = seen_at(lane + 8);
      layer<TAPS>(p.weight_in, p.hidden_channels, inputs, channels(r) + j, p.bias_in, [&](long o, v8 left, v8 right) {
        left = pick(left > 0.0f, left, left * LEAK);
        right = pick(right > 0.0f, right, right * LEAK);
        store(hidden + o * STRIDE + j, (v8)((i8)left & first));
        store(hidden + o * STRIDE + j + 8, (v8)((i8)right & second));
      });
    }
  }

  // Scores of one row at 16 keys: use(head, left, right).
  template <int TAPS, class Use>
  void score(long r, long j, const float* hidden, Use use) {
    const float* own = channels(r) + j;
    layer<TAPS>(p.weight_out, p.output_channels, p.hidden_channels, hidden + j, p.bias_out, [&](long h, v8 left, v8 right) {
      if (h >= heads) return;
      const float *a = own + h * STRIDE, *b = own + (heads + h) * STRIDE;
      use(h, load(a) + load(b) + left, load(a + 8) + load(b + 8) + right);
    });
  }

  // The last keys of this block stand in front of the next.
  void move_on() {
    for (long n = 0; n < rows * inputs; ++n) store(&x[n * STRIDE], load(&x[n * STRIDE + COLUMNS]));
    for (long r = 0; r < rows; ++r) std::memcpy(&visible[r * STRIDE], &visible[r * STRIDE + COLUMNS], MARGIN * sizeof(int32_t));
  }
};

// The keys of a block that begins at `column`, which may lie outside: the first one, how many, and how many are left out.
struct Span {
  long first, count, skip;
  Span(long column, long end) : first(std::max<long>(0, column)), count(0), skip(first - column) {
    count = std::max<long>(0, std::min(column + COLUMNS, end) - first);
  }
};

template <int TAPS>
void network_forward(const Task& p, long s, long row, const float* packed) {
  constexpr long LAG = TAPS / 2;
  NetworkRows block(p, s, row);
  const long rows = block.rows, heads = p.heads, hidden_size = p.hidden_channels * STRIDE;
  std::vector<float> hidden(hidden_size), edges(LAG * rows * p.hidden_channels * MARGIN), summed(heads * rows * p.value);
  std::vector<float> weights(heads * rows * COLUMNS);
  std::vector<Softmax> softmax(heads * rows);
  for (long h = 0; h < heads; ++h)
    for (long r = 0; r < rows; ++r)
      softmax[h * rows + r].begin(p.sink ? p.sink + (s * heads + h) * p.queries + row + r : nullptr);
  const long end = block.seen.from < block.seen.to ? blocks_of(block.seen.to + 2 * LAG) : 0;
  for (long b = block.seen.from / COLUMNS; b < end; ++b) {
    const long column = b * COLUMNS;
    block.take(b, packed);
    for (long r = 0; r < rows; ++r) {
      float* own = &hidden[MARGIN];
      float* edge = edges.data() + r * p.hidden_channels * MARGIN;
      for (long o = 0; LAG && o < p.hidden_channels; ++o) store(own + o * STRIDE - MARGIN, load(edge + o * MARGIN));
      block.hide<TAPS>(r, column, own);
      for (long o = 0; LAG && o < p.hidden_channels; ++o) store(edge + o * MARGIN, load(own + o * STRIDE + COLUMNS - MARGIN));
      for (long j = -2 * LAG; j < COLUMNS - 2 * LAG; j += PANEL) {
        const long at = j + 2 * LAG;
        if (!block.seen.any(r, column + j, PANEL)) {
          for (long h = 0; h < heads; ++h) {
            store(&weights[(h * rows + r) * COLUMNS + at], all(-INF));
            store(&weights[(h * rows + r) * COLUMNS + at + 8], all(-INF));
          }
          continue;
        }
        const int32_t* lane = block.lanes(r) + j;
        const i8 first = seen_at(lane), second = seen_at(lane + 8);
        block.score<TAPS>(r, j, own, [&](long h, v8 left, v8 right) {
          const float factor = factor_of(p, s * heads + h, row + r);
          float* to = &weights[(h * rows + r) * COLUMNS + at];
          store(to, pick(first, left * factor, all(-INF)));
          store(to + 8, pick(second, right * factor, all(-INF)));
        });
      }
      for (long h = 0; h < heads; ++h)
        fade(&summed[(h * rows + r) * p.value], p.value, softmax[h * rows + r].add(&weights[(h * rows + r) * COLUMNS]));
    }
    const Span keys(column - 2 * LAG, block.seen.to);
    for (long h = 0; keys.count > 0 && h < heads; ++h) {
      const float* v = p.v + ((s * heads + h) / p.group * p.keys + keys.first) * p.value;
      product<false>(&weights[h * rows * COLUMNS + keys.skip], COLUMNS, v, p.value, PANEL, &summed[h * rows * p.value],
                     p.value, rows, p.value, keys.count, true);
    }
    if (LAG) block.move_on();
  }
  for (long h = 0; h < heads; ++h)
    for (long r = 0; r < rows; ++r) {
      const long at = (s * heads + h) * p.queries + row + r;
      softmax[h * rows + r].end(p, at, &summed[(h * rows + r) * p.value]);
    }
}

// sums[i][j], vectors of eight parts, += the sum over some rows and their lanes of a[i] b[j].
template <int I, int J>
inline void dots(const float* a, long row_a, const float* b, long row_b, const long* from, const long* to, long rows,
                 float* sums, long lds) {
  v8 total[I][J];
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) total[i][j] = all(0);
  for (long r = 0; r < rows; ++r)
    for (long n = from[r]; n < to[r]; n += 8) {
      const float *x = a + r * row_a + n, *y = b + r * row_b + n;
      v8 right[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) right[j] = load(y + j * STRIDE);
#pragma GCC unroll 4
      for (int i = 0; i < I; ++i) {
        const v8 left = load(x + i * STRIDE);
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) total[i][j] += left * right[j];
      }
    }
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) {
      float* at = sums + (i * lds + j) * 8;
      store(at, load(at) + total[i][j]);
    }
}

// Where blocks of rows take turns: counts of what has been done.
struct Turns {
  std::vector<std::atomic<int32_t>> done;
  explicit Turns(long count) : done(count) {}

  void wait(long place, int32_t before) {
    for (long spins = 0; done[place].load(std::memory_order_acquire) != before; ++spins)
      if (spins > 64) std::this_thread::yield();
  }
  void pass(long place) { done[place].fetch_add(1, std::memory_order_release); }
};

struct NetworkBackward {
  const Task& p;
  const std::vector<float>&k_panels, &v_panels;
  std::vector<float> into, out_of;  // the layers' weights turned round: tap x hidden x input, tap x output x hidden
  long row_blocks, key_blocks;
  Turns at_keys, at_strand;
  std::vector<long> first, last;  // the blocks of keys that a block of rows visits

  template <int TAPS>
  long visits_end(const Seen& seen) const {
    return seen.from < seen.to ? blocks_of(seen.to + 4 * (TAPS / 2)) : 0;
  }

  NetworkBackward(const Task& task, const std::vector<float>& k, const std::vector<float>& v)
      : p(task), k_panels(k), v_panels(v), into(p.hidden_channels * p.kernel * p.input_channels),
        out_of(p.output_channels * p.kernel * p.hidden_channels), row_blocks((p.row_to - p.row_from + ROWS - 1) / ROWS),
        key_blocks(blocks_of(p.keys + 4)), at_keys(p.batch * key_blocks), at_strand(p.batch * STRANDS),
        first(p.batch * row_blocks), last(p.batch * row_blocks) {
    const long taps = p.kernel, inputs = p.input_channels, hidden = p.hidden_channels, outputs = p.output_channels;
    for (long o = 0; o < hidden; ++o)
      for (long t = 0; t < taps; ++t) {
        for (long i = 0; i < inputs; ++i) into[(t * hidden + o) * inputs + i] = p.weight_in[((taps - 1 - t) * inputs + i) * hidden + o];
        for (long h = 0; h < outputs; ++h)
          out_of[(t * outputs + h) * hidden + o] = p.weight_out[((taps - 1 - t) * hidden + o) * outputs + h];
      }
    for (long s = 0; s < p.batch; ++s)
      for (long n = 0; n < row_blocks; ++n) {
        const long row = p.row_from + n * ROWS;
        const Seen seen(p, s, row, std::min(ROWS, p.row_to - row));
        first[s * row_blocks + n] = seen.from < seen.to ? seen.from / COLUMNS : 0;
        last[s * row_blocks + n] = p.kernel == 3 ? visits_end<3>(seen) : visits_end<1>(seen);
      }
  }

  // The longest rows come first, so that threads end together.
  template <int TAPS>
  void rows_of(long turn) {
    constexpr long LAG = TAPS / 2;
    const long s = turn % p.batch, order = turn / p.batch, n = row_blocks - 1 - order, strand = order % STRANDS;
    const long row = p.row_from + n * ROWS, heads = p.heads, hidden = p.hidden_channels, outputs = p.output_channels;
    NetworkRows block(p, s, row);
    const long rows = block.rows, inputs = block.inputs, begin = first[s * row_blocks + n], end = last[s * row_blocks + n];
    std::vector<int32_t> before(key_blocks + 1);
    for (long m = n + 1; m < row_blocks; ++m)
      if (first[s * row_blocks + m] < last[s * row_blocks + m]) {
        ++before[first[s * row_blocks + m]];
        --before[last[s * row_blocks + m]];
      }
    for (long b = 1; b <= key_blocks; ++b) before[b] += before[b - 1];
    const long unit = hidden * STRIDE;
    std::vector<float> hid(GROUP * unit), d_hid(GROUP * unit), edges(LAG * rows * 2 * hidden * MARGIN);
    std::vector<float> weights(heads * rows * COLUMNS), d_weights(heads * rows * COLUMNS), d_scores(rows * outputs * STRIDE);
    std::vector<float> d_content(heads * rows * COLUMNS), d_bias(heads * rows * COLUMNS), d_factor(heads * rows);
    std::vector<float> of_in(TAPS * hidden * inputs * 8), of_out(TAPS * hidden * outputs * 8), of_bias_in(hidden * 8),
        of_bias_out(outputs * 8);
    // Sums over a tile are float32, those over tiles float64.
    std::vector<double> totals(TAPS * hidden * (inputs + outputs) + hidden + outputs);
    at_strand.wait(s * STRANDS + strand, order / STRANDS);
    for (long b = begin; b < end; ++b) {
      const long column = b * COLUMNS;
      block.take(b, k_panels.data());
      const Span of_values(column - 2 * LAG, block.seen.to), of_keys(column - 4 * LAG, block.seen.to);
      const long needed = of_values.count > 0 ? (of_values.skip + of_values.count + PANEL - 1) / PANEL * PANEL : 0;
      for (long h = 0; needed > 0 && h < heads; ++h) {
        const float* v = v_panels.data() + ((s * heads + h) / p.group * blocks_of(p.keys + 2 * LAG) + b) * COLUMNS * p.value;
        product<false>(p.d_out + ((s * heads + h) * p.queries + row) * p.value, p.value, v, PANEL, PANEL * p.value,
                       &d_weights[h * rows * COLUMNS], COLUMNS, rows, needed, p.value, false);
      }
      for (long g = 0; g < rows; g += GROUP) {
        const long count = std::min(GROUP, rows - g);
        long scored_from[GROUP], scored_to[GROUP], hidden_from[GROUP], hidden_to[GROUP];
        for (long r = g; r < g + count; ++r) {
          float *own = &hid[(r - g) * unit + MARGIN], *d_own = &d_hid[(r - g) * unit + MARGIN];
          float* edge = edges.data() + r * 2 * hidden * MARGIN;
          for (long o = 0; LAG && o < hidden; ++o) {
            store(own + o * STRIDE - MARGIN, load(edge + 2 * o * MARGIN));
            store(d_own + o * STRIDE - MARGIN, load(edge + (2 * o + 1) * MARGIN));
          }
          block.hide<TAPS>(r, column, own);
          float* d_score = &d_scores[r * outputs * STRIDE + MARGIN];
          weigh<TAPS>(block, r, column, own, weights.data(), d_weights.data(), d_score, d_factor.data(), of_bias_out.data());
          hide_back<TAPS>(block, r, column, own, d_score, d_own, of_bias_in.data());
          content_back<TAPS>(block, r, column, d_own, d_score, d_content.data(), d_bias.data());
          limits(block.seen, r, column, 2 * LAG, scored_from[r - g], scored_to[r - g]);
          limits(block.seen, r, column, 3 * LAG, hidden_from[r - g], hidden_to[r - g]);
          for (long o = 0; LAG && o < hidden; ++o) {
            store(edge + 2 * o * MARGIN, load(own + o * STRIDE + COLUMNS - MARGIN));
            store(edge + (2 * o + 1) * MARGIN, load(d_own + o * STRIDE + COLUMNS - MARGIN));
          }
        }
        for (long o = 0; o < hidden; o += 4) {
          for (long t = 0; t < TAPS; ++t) {
            for (long i = 0; i < inputs; i += ACROSS)
              dots<4, ACROSS>(&d_hid[o * STRIDE + MARGIN], unit, block.channels(g) + i * STRIDE + t - LAG, inputs * STRIDE,
                              hidden_from, hidden_to, count, &of_in[((t * hidden + o) * inputs + i) * 8], inputs);
            for (long h = 0; h < outputs; h += ACROSS)
              dots<4, ACROSS>(&hid[o * STRIDE + MARGIN + t - LAG], unit, &d_scores[(g * outputs + h) * STRIDE + MARGIN],
                              outputs * STRIDE, scored_from, scored_to, count,
                              &of_out[((t * hidden + o) * outputs + h) * 8], outputs);
          }
        }
      }
      double* total = totals.data();
      for (auto* part : {&of_in, &of_out, &of_bias_in, &of_bias_out}) {
        for (size_t m = 0; m < part->size(); m += 8) *total++ += sum(load(part->data() + m));
        std::fill(part->begin(), part->end(), 0.0f);
      }
      at_keys.wait(s * key_blocks + b, before[b]);
      for (long h = 0; h < heads; ++h) {
        const long index = s * heads + h, kv = index / p.group;
        if (of_values.count > 0)
          product<true>(&weights[h * rows * COLUMNS + of_values.skip], COLUMNS, p.d_out + (index * p.queries + row) * p.value,
                        p.value, PANEL, p.d_v + (kv * p.keys + of_values.first) * p.value, p.value, of_values.count, p.value,
                        rows, true);
        if (of_keys.count > 0)
          product<true>(&d_content[h * rows * COLUMNS + of_keys.skip], COLUMNS, &block.scaled[h * rows * p.dim], p.dim, PANEL,
                        p.d_k + (kv * p.keys + of_keys.first) * p.dim, p.dim, of_keys.count, p.dim, rows, true);
        if (p.learned && p.kind == LEVEL) take_bias(block, h, strand, column - 4 * LAG, d_bias.data());
      }
      at_keys.pass(s * key_blocks + b);
      for (long h = 0; h < heads && of_keys.count > 0; ++h) {
        const long index = s * heads + h, kv = index / p.group;
        product<false>(&d_content[h * rows * COLUMNS + of_keys.skip], COLUMNS, p.k + (kv * p.keys + of_keys.first) * p.dim,
                       p.dim, PANEL, p.d_q + (index * p.queries + row) * p.dim, p.dim, rows, p.dim, of_keys.count, true);
        if (p.learned && p.kind != LEVEL) take_bias(block, h, strand, column - 4 * LAG, d_bias.data());
      }
      if (!LAG) continue;
      block.move_on();
      for (long m = 0; m < rows * outputs; ++m) store(&d_scores[m * STRIDE], load(&d_scores[m * STRIDE + COLUMNS]));
    }
    for (long h = 0; h < heads; ++h) {
      const long at = (s * heads + h) * p.queries + row;
      scale_into(p.d_q + at * p.dim, p.d_q + at * p.dim, rows * p.dim, p.scale);
      for (long r = 0; p.d_logit_scale && r < rows; ++r) p.d_logit_scale[at + r] = d_factor[h * rows + r];
    }
    double* to = p.d_network + (s * STRANDS + strand) * totals.size();
    for (size_t m = 0; m < totals.size(); ++m) to[m] += totals[m];
    at_strand.pass(s * STRANDS + strand);
  }

  void take_bias(NetworkRows& block, long h, long strand, long column, const float* d_bias) const {
    collect_bias(p, block.s, h, strand, block.row, block.rows, column, d_bias + h * block.rows * COLUMNS, COLUMNS);
  }

  // The lanes of a layer that lags `lag` keys behind where a row sees something, in panels.
  static void limits(const Seen& seen, long r, long column, long lag, long& from, long& to) {
    from = to = -lag;
    for (long j = -lag; j < COLUMNS - lag; j += PANEL) {
      if (!seen.any(r, column + j, PANEL)) continue;
      if (from == to) from = j;
      to = j + PANEL;
    }
  }

  static void clear(float* x, long channels, long step, long j) {
    for (long c = 0; c < channels; ++c, x += step) {
      store(x + j, all(0));
      store(x + j + 8, all(0));
    }
  }

  // Weights and the gradient of the scores of one row.
  template <int TAPS>
  void weigh(NetworkRows& block, long r, long column, const float* hidden, float* weights, const float* d_weights,
             float* d_score, float* d_factor, float* of_bias) const {
    constexpr long LAG = TAPS / 2;
    const long heads = p.heads, rows = block.rows;
    for (long j = -2 * LAG; j < COLUMNS - 2 * LAG; j += PANEL) {
      float* w = weights + r * COLUMNS + j + 2 * LAG;
      if (!block.seen.any(r, column + j, PANEL)) {
        clear(w, heads, rows * COLUMNS, 0);
        clear(d_score, p.output_channels, STRIDE, j);
        continue;
      }
      const int32_t* lane = block.lanes(r) + j;
      const i8 seen[2] = {seen_at(lane), seen_at(lane + 8)};
      block.score<TAPS>(r, j, hidden, [&](long h, v8 left, v8 right) {
        const long at = (block.s * heads + h) * p.queries + block.row + r;
        const float factor = factor_of(p, block.s * heads + h, block.row + r), most = p.most[at], share = 1 / p.total[at],
                    drop = p.delta[at], centre = centre_of(p, at);
        const v8 scores[2] = {left, right};
        v8 way = all(0), total = all(0);
        for (int half = 0; half < 2; ++half) {
          const long to = h * rows * COLUMNS + 8 * half;
          const v8 raw = pick(seen[half], scores[half] * factor - most, all(-INF));
          const v8 weight = exponential(raw) * share;
          const v8 d = (v8)((i8)(weight * (load(d_weights + r * COLUMNS + j + 2 * LAG + to) - drop)) & seen[half]);
          store(w + to, weight);
          store(d_score + h * STRIDE + j + 8 * half, d * factor);
          way += (v8)((i8)(d * (scores[half] - centre)) & seen[half]);
          total += d * factor;
        }
        store(of_bias + h * 8, load(of_bias + h * 8) + total);
        if (p.d_logit_scale) d_factor[h * rows + r] += sum(way);
      });
    }
  }

  template <int TAPS>
  void hide_back(NetworkRows& block, long r, long column, const float* hidden, const float* d_score, float* d_hidden,
                 float* of_bias) const {
    constexpr long LAG = TAPS / 2;
    for (long j = -3 * LAG; j < COLUMNS - 3 * LAG; j += PANEL) {
      if (!block.seen.any(r, column + j, PANEL)) {
        clear(d_hidden, p.hidden_channels, STRIDE, j);
        continue;
      }
      const int32_t* lane = block.lanes(r) + j;
      const i8 first = seen_at(lane), second = seen_at(lane + 8);
      layer<TAPS>(out_of.data(), p.hidden_channels, p.output_channels, d_score + j, nullptr, [&](long o, v8 left, v8 right) {
        const float* own = hidden + o * STRIDE + j;
        left = (v8)((i8)pick(load(own) > 0.0f, left, left * LEAK) & first);
        right = (v8)((i8)pick(load(own + 8) > 0.0f, right, right * LEAK) & second);
        store(d_hidden + o * STRIDE + j, left);
        store(d_hidden + o * STRIDE + j + 8, right);
        store(of_bias + o * 8, load(of_bias + o * 8) + (left + right));
      });
    }
  }

  template <int TAPS>
  void content_back(NetworkRows& block, long r, long column, const float* d_hidden, const float* d_score, float* d_content,
                    float* d_bias) const {
    constexpr long LAG = TAPS / 2;
    const long heads = p.heads, rows = block.rows, step = rows * COLUMNS;
    const float part = p.softcap > 0 ? float(1 / p.softcap) : 0;
    for (long j = -4 * LAG; j < COLUMNS - 4 * LAG; j += PANEL) {
      float *to_content = d_content + r * COLUMNS + j + 4 * LAG, *to_bias = d_bias + r * COLUMNS + j + 4 * LAG;
      if (!block.seen.any(r, column + j, PANEL)) {
        clear(to_content, heads, step, 0);
        clear(to_bias, heads, step, 0);
        continue;
      }
      const int32_t* lane = block.lanes(r) + j;
      const i8 seen[2] = {seen_at(lane), seen_at(lane + 8)};
      const float* content = block.channels(r) + j;
      layer<TAPS>(into.data(), p.input_channels, p.hidden_channels, d_hidden + j, nullptr, [&](long i, v8 left, v8 right) {
        if (i >= 2 * heads) return;
        const long h = i < heads ? i : i - heads;
        const v8 d[2] = {left, right};
        for (int half = 0; half < 2; ++half) {
          v8 x = (v8)((i8)(d[half] + load(d_score + h * STRIDE + j + 8 * half)) & seen[half]);
          if (i < heads && part > 0) {
            const v8 capped = load(content + h * STRIDE + 8 * half) * part;
            x *= 1.0f - capped * capped;
          }
          store((i < heads ? to_content : to_bias) + h * step + 8 * half, x);
        }
      });
    }
  }
};

}  // namespace

extern "C" {

void lengthwise_network_forward(const Task* p) {
  const long blocks = (p->row_to - p->row_from + ROWS - 1) / ROWS;
  const std::vector<float> packed = blocks > 1 ? pack_all(*p, p->k, p->dim, 0) : std::vector<float>();
  share(p->threads, p->batch * blocks, [&](long n) {
    const long row = p->row_from + (blocks - 1 - n / p->batch) * ROWS;
    (p->kernel == 3 ? network_forward<3> : network_forward<1>)(*p, n % p->batch, row, blocks > 1 ? packed.data() : nullptr);
  });
}

void lengthwise_network_backward(const Task* p) {
  const std::vector<float> k = pack_all(*p, p->k, p->dim, 0), v = pack_all(*p, p->v, p->value, p->kernel == 3 ? 2 : 0);
  NetworkBackward pass(*p, k, v);
  share(p->threads, p->batch * pass.row_blocks, [&](long turn) {
    if (p->kernel == 3)
      pass.rows_of<3>(turn);
    else
      pass.rows_of<1>(turn);
  });
}

}
