// Attention whose scores are rescored, in tiles: nothing between two products leaves the cache of its thread.
//
//   content[i, j] = scale q[i] . k[j], capped       A; 0 where hidden, as the bias, B
//   network       scores = A + B + f([A; B])        along the heads, and with a kernel of 3 over a key's neighbours too
//   positions     scores = A + B + q . e(position)  position[i, j] = sum of sigmoid(A[i, l]) over visible l >= j
//   weights       exp(logit_scale scores - lse)
//
// The network needs all heads of a sequence at once: its work is a block of rows, and keys are walked from the left.
// With a kernel of 3 each layer lags one key behind the one before it, so that nothing is computed twice at the edges
// of blocks. Positions are counted from the right, in one head at a time.
//
// A row's numbers are summed in an order that depends on the row alone: decoding gives the bits of one whole pass.
// Sums over rows have a fixed order too, whatever the number of threads: blocks of rows take turns at a block of keys,
// and everything else they add to is one of STRANDS sums, which are added at the end.

#include <cmath>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr long ROWS = 24, POSITION_ROWS = 48, COLUMNS = 64, PANEL = 16;
constexpr long MARGIN = 8;                 // the last keys of the block before, which the neighbours' sums reach
constexpr long STRIDE = COLUMNS + MARGIN;  // not a power of two: channels must not share a set of the cache
constexpr long GROUP = 4;                  // rows whose hidden layers are alive at once
constexpr long STRANDS = 16;
constexpr float LEAK = 0.01f;
#ifdef __AVX512VL__
constexpr long MOST = 8, ACROSS = 4;  // accumulators that fit into 32 registers
#else
constexpr long MOST = 6, ACROSS = 2;
#endif

// What Python hands over; rescore.py has the same fields in the same order. Arrays are contiguous.
struct Task {
  int64_t batch, heads, group, queries, keys, dim, value, start, causal, threads, row_from, row_to;
  int64_t hidden, hidden_channels, input_channels, output_channels, kernel, positions, position_channels;
  int64_t kind, learned, mask_batch, strip_batch, strip_head, strip_length, level_batch, level_head, key_level_batch,
      key_level_head, slope_batch, slope_head, rows_batch, rows_head;
  double scale, softcap;
  const float *q, *k, *v;
  const uint8_t* mask;  // (batch or 1, row, key) of the rows of this call
  const float* strip;
  const double *query_level, *key_level;
  const float *slope, *rows;  // `rows` is the bias of the rows of this call, filled in
  const float *logit_scale, *sink;
  const float *weight_in, *bias_in, *weight_out, *bias_out;  // tap x input x hidden, tap x hidden x output
  const float *table, *table_t;                              // dim x position, position x dim
  float *out, *lse, *most, *total;  // of a row: the largest score and the sum relative to it, more exact than lse
  const float *d_out, *delta;
  float *d_q, *d_k, *d_v, *d_strip, *d_slope;
  double *d_query_level, *d_key_level;
  float *d_rows, *d_logit_scale;
  double* d_network;
  float* d_table;
};

enum Kind { NONE = 0, STRIP = 1, LEVEL = 2, FILLED = 3 };

inline v8 lanes_and(v8 x, const int32_t* seen) {
  i8 m;
  std::memcpy(&m, seen, sizeof m);
  return (v8)((i8)x & m);
}

inline i8 seen_at(const int32_t* seen) {
  i8 m;
  std::memcpy(&m, seen, sizeof m);
  return m;
}

// tanh to about one unit in the last place. (Cephes' polynomial near 0.)
inline v8 hyperbolic_tangent(v8 x) {
  const v8 size = absolute(x), square = x * x;
  v8 p = all(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const v8 near = p * square * x + x;
  const v8 twice = pick(size > 20.0f, all(40.0f), size + size);
  const v8 away = 1.0f - 2.0f / (exponential(twice) + 1.0f);
  const v8 far = pick(x < 0.0f, -away, away);
  return pick(x == x, pick(size < 0.625f, near, far), x);
}

inline v8 sigmoid(v8 x) {
  const v8 minus = pick(x < -80.0f, all(80.0f), -x);
  return 1.0f / (1.0f + exponential(minus));
}

// Call work(M, first) for `count` things in even blocks of M <= MOST, M known to the compiler.
template <class Work>
inline void in_blocks(long count, Work work) {
  long first = 0;
  for (long left = (count + MOST - 1) / MOST; left > 0; --left) {
    const long m = (count - first + left - 1) / left;
    switch (m) {
      case 8: work(std::integral_constant<int, 8>{}, first); break;
      case 7: work(std::integral_constant<int, 7>{}, first); break;
      case 6: work(std::integral_constant<int, 6>{}, first); break;
      case 5: work(std::integral_constant<int, 5>{}, first); break;
      case 4: work(std::integral_constant<int, 4>{}, first); break;
      case 3: work(std::integral_constant<int, 3>{}, first); break;
      case 2: work(std::integral_constant<int, 2>{}, first); break;
      case 1: work(std::integral_constant<int, 1>{}, first); break;
    }
    first += m;
  }
}

// c[M][16] = or += a b; a is read along its rows (step 1 in k) or, transposed, along its columns.
template <int M, bool TRANSPOSED>
inline void panel(const float* a, long lda, const float* b, long ldb, float* c, long ldc, long count, bool add) {
  v8 left[M], right[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    left[m] = add ? load(c + m * ldc) : all(0);
    right[m] = add ? load(c + m * ldc + 8) : all(0);
  }
  for (long k = 0; k < count; ++k) {
    const v8 b0 = load(b), b1 = load(b + 8);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const v8 x = all(TRANSPOSED ? a[m] : a[m * lda]);
      left[m] += x * b0;
      right[m] += x * b1;
    }
    a += TRANSPOSED ? lda : 1;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    store(c + m * ldc, left[m]);
    store(c + m * ldc + 8, right[m]);
  }
}

// c (rows x columns) = or += a b, columns a multiple of 16; the next panel of b is `step` further on.
template <bool TRANSPOSED>
void product(const float* a, long lda, const float* b, long ldb, long step, float* c, long ldc, long rows, long columns,
             long count, bool add) {
  for (long n = 0; n < columns; n += PANEL, b += step)
    in_blocks(rows, [&](auto m, long first) {
      panel<m.value, TRANSPOSED>(a + (TRANSPOSED ? first : first * lda), lda, b, ldb, c + first * ldc + n, ldc, count, add);
    });
}

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

// The 64 keys from `first` on, sixteen side by side; 0 where there is no key.
void pack(const float* x, long dim, long keys, long first, float* to) {
  for (long n = 0; n < COLUMNS; n += PANEL, to += PANEL * dim)
    for (long lane = 0; lane < PANEL; ++lane) {
      const long key = first + n + lane;
      const float* from = x + key * dim;
      if (key < 0 || key >= keys)
        for (long d = 0; d < dim; ++d) to[d * PANEL + lane] = 0;
      else
        for (long d = 0; d < dim; ++d) to[d * PANEL + lane] = from[d];
    }
}

// What some rows see: from `low` up to `high`, all of it unless there are holes.
struct Seen {
  long low[POSITION_ROWS], high[POSITION_ROWS], from, to;
  const uint8_t* bytes[POSITION_ROWS];  // null without holes

  Seen(const Task& p, long sequence, long row, long rows) : from(p.keys), to(0) {
    for (long r = 0; r < rows; ++r) {
      low[r] = 0;
      high[r] = p.causal ? std::max<long>(0, std::min<long>(p.keys, p.start + row + r + 1)) : p.keys;
      bytes[r] = nullptr;
      if (p.mask) {
        const uint8_t* own = p.mask + sequence * p.mask_batch + (row + r - p.row_from) * p.keys;
        const void* first = std::memchr(own, 1, p.keys);
        low[r] = first ? static_cast<const uint8_t*>(first) - own : 0;
        high[r] = first ? p.keys : 0;
        while (high[r] > low[r] && !own[high[r] - 1]) --high[r];
        if (high[r] > low[r] && std::memchr(own + low[r], 0, high[r] - low[r])) bytes[r] = own;
      }
      if (low[r] < high[r]) {
        from = std::min(from, low[r]);
        to = std::max(to, high[r]);
      }
    }
  }

  bool any(long r, long column, long count) const { return low[r] < column + count && high[r] > column && low[r] < high[r]; }

  // -1 where the row sees a key, for a block of keys.
  void fill(long r, long column, int32_t* seen) const {
    for (long j = 0; j < COLUMNS; ++j) seen[j] = -int32_t(column + j >= low[r] && column + j < high[r]);
    if (bytes[r])
      for (long j = std::max<long>(0, low[r] - column); j < std::min(COLUMNS, high[r] - column); ++j)
        seen[j] = -int32_t(bytes[r][column + j] != 0);
  }
};

struct LevelRow {
  const double* key;
  double query;

  // query_level - key_level of eight keys, taken before it is rounded.
  v8 difference(long j) const {
    v8 out;
    v4d first, second;
    std::memcpy(&first, key + j, sizeof first);
    std::memcpy(&second, key + j + 4, sizeof second);
    const v4 parts[2] = {__builtin_convertvector(query - first, v4), __builtin_convertvector(query - second, v4)};
    std::memcpy(&out, parts, sizeof out);
    return out;
  }
};

// Levels and strips have MARGIN entries in front of the first key and two blocks behind the last.
inline LevelRow level_row(const Task& p, long s, long h, long row, long column) {
  return {p.key_level + s * p.key_level_batch + h * p.key_level_head + MARGIN + column,
          p.query_level[s * p.level_batch + h * p.level_head + row]};
}

inline float slope_of(const Task& p, long s, long h, long row) { return p.slope[s * p.slope_batch + h * p.slope_head + row]; }

// The bias of a row and a block of keys, whatever lies there where no key is.
void fill_bias(const Task& p, long s, long h, long row, long column, float* to) {
  if (p.kind == STRIP) {
    const float* strip = p.strip + s * p.strip_batch + h * p.strip_head + column - row + p.queries - 1 + MARGIN;
    for (long j = 0; j < COLUMNS; j += 8) store(to + j, load(strip + j));
  } else if (p.kind == LEVEL) {
    const LevelRow levels = level_row(p, s, h, row, column);
    const v8 steep = all(-slope_of(p, s, h, row));
    for (long j = 0; j < COLUMNS; j += 8) store(to + j, steep * absolute(levels.difference(j)));
  } else if (p.kind == FILLED) {
    const float* from = p.rows + s * p.rows_batch + h * p.rows_head + (row - p.row_from) * p.keys + column;
    const long count = std::max<long>(0, std::min(COLUMNS, p.keys - column));
    std::memcpy(to, from, count * sizeof(float));
    std::fill(to + count, to + COLUMNS, 0.0f);
  } else {
    std::fill(to, to + COLUMNS, 0.0f);
  }
}

// The gradient of the bias of some rows and the 64 keys from `column` on, of which some may lie outside the keys and
// are 0. Only what is per key is added to in turn with other blocks of rows.
void collect_bias(const Task& p, long s, long h, long strand, long row, long rows, long column, const float* d, long ldd) {
  const long index = s * p.heads + h;
  const long begin = std::max<long>(0, -column), end = std::min(COLUMNS, p.keys - column);
  alignas(32) float of_keys[COLUMNS] = {};
  for (long r = 0; r < rows; ++r, d += ldd) {
    if (p.kind == STRIP) {
      float* to = p.d_strip + ((s * STRANDS + strand) * p.heads + h) * p.strip_length + column - (row + r) + p.queries - 1 + MARGIN;
      for (long j = 0; j < COLUMNS; j += 8) store(to + j, load(to + j) + load(d + j));
    } else if (p.kind == LEVEL) {
      const LevelRow levels = level_row(p, s, h, row + r, column);
      const float steep = slope_of(p, s, h, row + r);
      v8 way = all(0), sign = all(0);
      for (long j = 0; j < COLUMNS; j += 8) {
        const v8 t = levels.difference(j), x = load(d + j);
        const v8 signed_x = pick(t > 0.0f, x, pick(t < 0.0f, -x, all(0)));
        way += x * absolute(t);
        sign += signed_x;
        store(of_keys + j, load(of_keys + j) + steep * signed_x);
      }
      p.d_slope[index * p.queries + row + r] -= sum(way);
      p.d_query_level[index * p.queries + row + r] -= double(steep) * sum(sign);
    } else if (p.kind == FILLED && end > begin) {
      float* to = p.d_rows + (index * (p.row_to - p.row_from) + row + r - p.row_from) * p.keys + column;
      std::memcpy(to + begin, d + begin, (end - begin) * sizeof(float));
    }
  }
  if (p.kind == LEVEL)
    for (long j = begin; j < end; ++j) p.d_key_level[index * p.keys + column + j] += of_keys[j];
}

// Products of queries and keys to content: capped, and 0 where hidden.
inline void finish_content(const Task& p, float* a, const int32_t* seen) {
  if (p.softcap > 0) {
    const float cap = float(p.softcap);
    for (long j = 0; j < COLUMNS; j += 8) store(a + j, lanes_and(cap * hyperbolic_tangent(load(a + j) / cap), seen + j));
  } else {
    for (long j = 0; j < COLUMNS; j += 8) store(a + j, lanes_and(load(a + j), seen + j));
  }
}

// A running softmax of one row: what its scores become, and by how much what was summed before fades.
struct Softmax {
  float most = -INF, total = 0;

  void begin(const float* sink) {
    if (!sink || *sink == -INF) return;
    most = *sink;
    total = 1;
  }

  float add(float* s) {
    v8 top = load(s);
    for (long j = 8; j < COLUMNS; j += 8) {
      const v8 x = load(s + j);
      top = pick(x > top, x, top);
    }
    const float peak = std::max(most, largest(top)), shift = peak == -INF ? 0 : peak;
    v8 added = all(0);
    for (long j = 0; j < COLUMNS; j += 8) {
      const v8 x = exponential(load(s + j) - shift);
      store(s + j, x);
      added += x;
    }
    const float fade = peak > most && most != -INF ? std::exp(most - peak) : 1.0f;
    total = total * fade + sum(added);
    most = peak;
    return fade;
  }

  void end(const Task& p, long at, const float* summed) const {
    const bool dead = total == 0;
    for (long d = 0; d < p.value; ++d) p.out[at * p.value + d] = dead ? 0 : summed[d] / total;
    p.lse[at] = dead ? -INF : most + std::log(total);
    p.most[at] = most;
    p.total[at] = total;
  }
};

inline float factor_of(const Task& p, long index, long row) { return p.logit_scale ? p.logit_scale[index * p.queries + row] : 1.0f; }

void fade(float* x, long count, float by) {
  if (by != 1)
    for (long d = 0; d < count; d += 8) store(x + d, load(x + d) * by);
}

void scale_into(float* to, const float* from, long count, double scale) {
  for (long n = 0; n < count; ++n) to[n] = from[n] * float(scale);
}

inline long blocks_of(long columns) { return (columns + COLUMNS - 1) / COLUMNS; }

// Keys or values of all heads in panels; block b begins `lag` keys before key 64 b.
std::vector<float> pack_all(const Task& p, const float* x, long dim, long lag) {
  const long heads = p.batch * (p.heads / p.group), blocks = blocks_of(p.keys + lag);
  std::vector<float> panels(heads * blocks * COLUMNS * dim);
  share(p.threads, heads * blocks, [&](long n) {
    pack(x + n / blocks * p.keys * dim, dim, p.keys, n % blocks * COLUMNS - lag, panels.data() + n * COLUMNS * dim);
  });
  return panels;
}

// ---- the network ----------------------------------------------------------------------------------------------------

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

  // Hidden units of one row, `REACH` keys behind; 0 where hidden.
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
    double* to = p.d_network + (s * STRANDS + strand) * (TAPS * hidden * (inputs + outputs) + hidden + outputs);
    for (const auto* part : {&of_in, &of_out, &of_bias_in, &of_bias_out})
      for (size_t m = 0; m < part->size(); m += 8) *to++ += sum(load(part->data() + m));
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
                    drop = p.delta[at];
        const v8 scores[2] = {left, right};
        v8 way = all(0), total = all(0);
        for (int half = 0; half < 2; ++half) {
          const long to = h * rows * COLUMNS + 8 * half;
          const v8 raw = pick(seen[half], scores[half] * factor - most, all(-INF));
          const v8 weight = exponential(raw) * share;
          const v8 d = (v8)((i8)(weight * (load(d_weights + r * COLUMNS + j + 2 * LAG + to) - drop)) & seen[half]);
          store(w + to, weight);
          store(d_score + h * STRIDE + j + 8 * half, d * factor);
          way += (v8)((i8)(d * scores[half]) & seen[half]);
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

// ---- contextual positions -------------------------------------------------------------------------------------------

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
        rows(std::min(POSITION_ROWS, task.row_to - first)), seen(task, sequence, first, rows), scaled(rows * task.dim),
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
                    drop = p.delta[at];
      v8 way = all(0);
      for (long j = 0; j < COLUMNS; j += 8) {
        const i8 seen = seen_at(&block.visible[r * COLUMNS + j]);
        const v8 score = load(w + j), weight = exponential(pick(seen, score * factor - most, all(-INF))) * share;
        const v8 own = (v8)((i8)(weight * (load(d + j) - drop)) & seen);
        store(w + j, weight);
        store(d + j, own * factor);
        way += (v8)((i8)(own * score) & seen);
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
  const long blocks = (p->row_to - p->row_from + POSITION_ROWS - 1) / POSITION_ROWS;
  const std::vector<float> packed = blocks > 1 ? pack_all(*p, p->k, p->dim, 0) : std::vector<float>();
  share(p->threads, p->batch * p->heads * blocks, [&](long n) {
    const long head = n / blocks, row = p->row_from + n % blocks * POSITION_ROWS;
    positions_forward(*p, head / p->heads, head % p->heads, row, blocks > 1 ? packed.data() : nullptr);
  });
}

// One thread has all rows of a key head to itself, so that their sums over rows have one order.
void lengthwise_positions_backward(const Task* p) {
  const long kv_heads = p->heads / p->group, blocks = blocks_of(p->keys);
  const std::vector<float> k = pack_all(*p, p->k, p->dim, 0), v = pack_all(*p, p->v, p->value, 0);
  share(p->threads, p->batch * kv_heads, [&](long n) {
    for (long h = 0; h < p->group; ++h)
      for (long row = p->row_from; row < p->row_to; row += POSITION_ROWS)
        positions_backward(*p, n / kv_heads, n % kv_heads * p->group + h, row, k.data() + n * blocks * COLUMNS * p->dim,
                           v.data() + n * blocks * COLUMNS * p->value);
  });
}

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
