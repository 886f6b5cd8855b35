// What the kernels of rescored attention share; rescore_network.cpp and rescore_positions.cpp have one rescore each.
//
// Tiles: nothing between two products leaves the cache of its thread.
//
//   content[i, j] = scale q[i] . k[j], capped       A; 0 where hidden, as the bias, B
//   network       scores = A + B + f([A; B])        along the heads, and with a kernel of 3 over a key's neighbours too
//   positions     scores = A + B + q . e(position)  position[i, j] = sum of sigmoid(A[i, l]) over visible l >= j
//   weights       exp(logit_scale scores - lse)
//
// A row's numbers are summed in an order that depends on the row alone: decoding gives the bits of one whole pass.
// Sums over rows have a fixed order too, whatever the number of threads.

#pragma once

#include <cmath>
#include <cstring>

#include "softcap.h"
#include "vectors.h"

namespace {

constexpr long COLUMNS = 64, MOST_ROWS = 48;
constexpr long MARGIN = 8;                 // the last keys of the block before, which the neighbours' sums reach
constexpr long STRIDE = COLUMNS + MARGIN;  // not a power of two: channels must not share a set of the cache
constexpr long STRANDS = 16;               // sums over rows of what has no place of its own, added at the end

// What Python hands over; rescore.py has the same fields in the same order. Arrays are contiguous.
struct Task {
  int64_t batch, heads, group, queries, keys, dim, value, start, causal, threads, row_from, row_to;
  int64_t hidden_channels, input_channels, output_channels, kernel, positions, position_channels;
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
  long low[MOST_ROWS], high[MOST_ROWS], from, to;
  const uint8_t* bytes[MOST_ROWS];  // null without holes

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
    const Cap<EXACT> capped{float(p.softcap)};
    for (long j = 0; j < COLUMNS; j += 8) store(a + j, lanes_and(capped(load(a + j)), seen + j));
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

// A score of the row, near where its weights are: its logit scale's gradient is summed relative to it, because the sum
// of the scores' gradients is known without rounding. rescore.py has the other half.
inline float centre_of(const Task& p, long at) {
  const float factor = p.logit_scale ? p.logit_scale[at] : 0;
  return factor == 0 || p.total[at] == 0 || (p.sink && p.most[at] == p.sink[at]) ? 0 : p.most[at] / factor;
}

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

}  // namespace
