// Attention in tiles for float32 on CPUs: the twin of row_block, where one thread has one head (or one block of its
// rows) to itself and everything between two products stays in its cache.
//
//   scores[i, j] = scale q[i] . k[j] + bias(i, j)      for low[i] <= j < high[i]
//   bias         = 0, or strip[j - i + queries - 1], or -slope[i] |query_level[i] - key_level[j]|,
//                  or line_slope[n] x + line_start[n] with x = factor[i] strip[j - i + queries - 1], n knots being <= x
//
// Forward keeps a running maximum and sum per row; backward starts from the log-sum-exp. Levels are float64, and their
// differences are taken before they are rounded, or relative to the block where it lies behind all rows. Far keys are
// skipped where a bound shows that they cannot matter: row_block/far_keys.py has the argument, this file the same
// inequalities row by row. Plain C++ with vectors of eight floats.

#include <cmath>
#include <cstring>

#include "vectors.h"

namespace {

constexpr int ROWS = 96, COLUMNS = 128, PANEL = 16;
constexpr float SMALL = 1.0f / (1 << 25);  // half a unit in the last place of float32

// c[M][16] = or += a b; a is read along its rows (step 1 in k) or, transposed, along its columns.
template <int M, bool TRANSPOSED>
inline void panel(const float* a, long lda, const float* b, long ldb, float* c, long ldc, long count, bool add) {
  v8 left[M], right[M];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    left[m] = add ? load(c + m * ldc) : all(0);
    right[m] = add ? load(c + m * ldc + 8) : all(0);
  }
  for (long k = 0; k < count; ++k) {
    const v8 b0 = load(b), b1 = load(b + 8);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const v8 x = all(TRANSPOSED ? a[m] : a[m * lda]);
      left[m] += x * b0;
      right[m] += x * b1;
    }
    a += TRANSPOSED ? lda : 1;
    b += ldb;
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    store(c + m * ldc, left[m]);
    store(c + m * ldc + 8, right[m]);
  }
}

// c (rows x columns) = or += a b, columns a multiple of 16. `step` is how far the next panel of b is.
template <bool TRANSPOSED>
void product(const float* a, long lda, const float* b, long ldb, long step, float* c, long ldc, long rows, long columns,
             long count, bool add) {
  for (long n = 0; n < columns; n += PANEL, b += step) {
    long m = 0;
    for (; m + 6 <= rows; m += 6)
      panel<6, TRANSPOSED>(a + (TRANSPOSED ? m : m * lda), lda, b, ldb, c + m * ldc + n, ldc, count, add);
    const float* rest = a + (TRANSPOSED ? m : m * lda);
    float* to = c + m * ldc + n;
    switch (rows - m) {
      case 5: panel<5, TRANSPOSED>(rest, lda, b, ldb, to, ldc, count, add); break;
      case 4: panel<4, TRANSPOSED>(rest, lda, b, ldb, to, ldc, count, add); break;
      case 3: panel<3, TRANSPOSED>(rest, lda, b, ldb, to, ldc, count, add); break;
      case 2: panel<2, TRANSPOSED>(rest, lda, b, ldb, to, ldc, count, add); break;
      case 1: panel<1, TRANSPOSED>(rest, lda, b, ldb, to, ldc, count, add); break;
    }
  }
}

float dot(const float* a, const float* b, long dim) {
  v8 left = all(0), right = all(0);
  for (long d = 0; d < dim; d += 16) {
    left += load(a + d) * load(b + d);
    right += load(a + d + 8) * load(b + d + 8);
  }
  return sum(left + right);
}

// The length of a vector, a little too long rather than too short: it is for bounds.
float length_of(const float* x, long dim) { return std::sqrt(dot(x, x, dim)) * 1.00001f; }

}  // namespace

// What Python hands over; problem.py has the same fields in the same order. All arrays are contiguous.
struct Problem {
  int64_t batch, heads, group, queries, keys, dim, value, start, kind, learned, skip, threads;
  int64_t strip_batches, strip_heads, level_batches, level_heads, slope_batches, slope_heads, slope_queries;
  int64_t factor_batches, knot_count;
  double scale;
  const float *q, *k, *v;
  const int32_t *low, *high;
  const float* strip;
  const double *query_level, *key_level;
  const float* slope;
  const float *factor, *knots, *line_slope, *line_start;
  float *out, *lse;
  const float* d_out;
  float *d_q, *d_k, *d_v, *d_strip, *d_slope;
  double *d_query_level, *d_key_level;
  float *d_factor, *d_line_slope, *d_line_start;
  int64_t* visited;  // keys visited, by sequence and head
};

namespace {

enum Kind { NONE = 0, STRIP = 1, LEVEL = 2, LINE = 3 };
constexpr int LINES = 256;  // at most so many, which Python sees to

// No less than e^x, and NaN for NaN: far below what counts, where numbers are denormal and slow, it stays at one value.
inline float at_most_exp(float x) { return std::exp(std::max(x, -80.0f)); }

// The levels of a block of keys. Behind all rows they are relative to the block's last, near all of them; else, where
// some keys come after some rows, nothing may be relative to a key that a row does not see.
struct Levels {
  bool behind = false;
  double ref = 0;
  alignas(32) float relative[COLUMNS];
  alignas(32) double exact[COLUMNS];

  struct Row {
    double exact;
    float relative;
  };

  Row row(double level) const { return {level, float(level - ref)}; }

  v8 difference(Row own, long j) const {
    if (behind) return own.relative - load(relative + j);
    v8 out;
    const v4d first = own.exact - *reinterpret_cast<const v4d*>(exact + j);
    const v4d second = own.exact - *reinterpret_cast<const v4d*>(exact + j + 4);
    const v4 parts[2] = {__builtin_convertvector(first, v4), __builtin_convertvector(second, v4)};
    std::memcpy(&out, parts, sizeof out);
    return out;
  }
};

// One head of one sequence.
struct Head {
  const Problem& p;
  long batch, head, blocks;
  const float *q, *k, *v;
  const int32_t *low, *high;
  const float* strip = nullptr;
  const double *query_level = nullptr, *key_level = nullptr;
  const float* slope = nullptr;
  long slope_step = 0;
  const float *factor = nullptr, *line_slope = nullptr, *line_start = nullptr;
  std::vector<float> k_panels, v_panels;        // keys and values, sixteen of them side by side
  std::vector<float> k_most, v_most, strip_most;  // largest length in a block of keys, largest entry so far away or more
  std::vector<double> level_most;               // highest level up to the end of a block

  Head(const Problem& problem, long index, bool backward)
      : p(problem), batch(index / problem.heads), head(index % problem.heads),
        blocks((problem.keys + COLUMNS - 1) / COLUMNS) {
    const long kv = batch * (p.heads / p.group) + head / p.group;
    q = p.q + index * p.queries * p.dim;
    k = p.k + kv * p.keys * p.dim;
    v = p.v + kv * p.keys * p.value;
    low = p.low + batch * p.queries;
    high = p.high + batch * p.queries;
    if (p.kind == STRIP || p.kind == LINE) {
      const long row = (p.strip_batches > 1 ? batch : 0) * p.strip_heads + (p.strip_heads > 1 ? head : 0);
      strip = p.strip + row * strip_length();
    }
    if (p.kind == LINE) {
      factor = p.factor + (p.factor_batches > 1 ? batch : 0) * p.queries;
      line_slope = p.line_slope + head * (p.knot_count + 1);
      line_start = p.line_start + head * (p.knot_count + 1);
    } else if (p.kind == LEVEL) {
      const long level = (p.level_batches > 1 ? batch : 0) * p.level_heads + (p.level_heads > 1 ? head : 0);
      query_level = p.query_level + level * p.queries;
      key_level = p.key_level + level * p.keys;
      const long row = (p.slope_batches > 1 ? batch : 0) * p.slope_heads + (p.slope_heads > 1 ? head : 0);
      slope = p.slope + row * p.slope_queries;
      slope_step = p.slope_queries > 1;
    }
    pack(k, p.dim, k_panels);
    if (backward) pack(v, p.value, v_panels);
    if (p.skip) bound();
  }

  long strip_length() const { return p.queries + p.keys + COLUMNS; }
  float slope_of(long i) const { return slope[i * slope_step]; }

  void pack(const float* x, long dim, std::vector<float>& panels) const {
    const long count = blocks * COLUMNS;
    panels.assign(count * dim, 0.0f);
    for (long j = 0; j < p.keys; j += PANEL) {
      const long lanes = std::min<long>(PANEL, p.keys - j);
      float* to = panels.data() + j * dim;
      for (long d = 0; d < dim; ++d, to += PANEL)
        for (long lane = 0; lane < lanes; ++lane) to[lane] = x[(j + lane) * dim + d];
    }
  }

  void bound() {
    k_most.assign(blocks, 0);
    v_most.assign(blocks, 0);
    if (p.kind == LEVEL) level_most.assign(blocks, -std::numeric_limits<double>::infinity());
    for (long j = 0; j < p.keys; ++j) {
      const long block = j / COLUMNS;
      // A NaN stays: it must never look small.
      const float of_k = length_of(k + j * p.dim, p.dim), of_v = length_of(v + j * p.value, p.value);
      if (!(of_k <= k_most[block])) k_most[block] = of_k;
      if (!(of_v <= v_most[block])) v_most[block] = of_v;
      if (p.kind == LEVEL && !(key_level[j] <= level_most[block])) level_most[block] = key_level[j];
    }
    for (long block = 1; block < (long)level_most.size(); ++block)
      if (!(level_most[block] >= level_most[block - 1])) level_most[block] = level_most[block - 1];
    if (p.kind == STRIP) {
      strip_most.resize(p.queries + p.keys);
      float most = -INF;
      for (long x = 0; x < p.queries + p.keys - 1; ++x) {
        if (!(strip[x] <= most)) most = strip[x];
        strip_most[x] = most;
      }
    }
  }

  // The largest bias between a row and the keys up to the end of a block that lies behind it.
  float ceiling(long i, long block) const {
    const long last = std::min<long>((block + 1) * COLUMNS, p.keys) - 1;
    if (p.kind == STRIP) return strip_most[last - i + p.queries - 1];
    if (p.kind != LEVEL) return 0;
    const double above = query_level[i] - level_most[block];
    const float steep = slope_of(i);
    if (!(steep >= 0)) return INF;
    return above > 0 ? float(-double(steep) * above) : (above == above ? 0 : float(above));
  }

  float bias_at(long i, long j) const {
    if (p.kind == STRIP) return strip[j - i + p.queries - 1];
    if (p.kind == LEVEL) return -slope_of(i) * float(std::fabs(query_level[i] - key_level[j]));
    return 0;
  }

  // A row's score on the key in its own slot; -inf if it does not see it, and then nothing is skipped.
  float own_score(long i) const {
    const long own = p.start + i;
    if (own < low[i] || own >= high[i]) return -INF;
    return dot(q + i * p.dim, k + own * p.dim, p.dim) * float(p.scale) + bias_at(i, own);
  }

  // The blocks of keys that a block of rows has to visit, from `first` on, before anything is skipped.
  void span(long row, long rows, long& first, long& last) const {
    long from = p.keys, to = 0;
    for (long i = row; i < row + rows; ++i) {
      if (low[i] >= high[i]) continue;
      from = std::min<long>(from, low[i]);
      to = std::max<long>(to, high[i]);
    }
    first = from / COLUMNS;
    last = (to + COLUMNS - 1) / COLUMNS;
  }

  // How many blocks from `first` on lie wholly behind a block of rows.
  long behind(long row, long first) const { return std::max(first, std::min((p.start + row) / COLUMNS, blocks)); }

  // Forward: the first block that matters to some row. What a row loses is measured against its own key's share.
  long first_needed(long row, long rows, long first) const {
    if (!p.skip || p.kind == NONE) return first;
    const long end = behind(row, first);
    float own[ROWS], lost[ROWS], ql[ROWS], vl[ROWS];
    for (long i = 0; i < rows && end > first; ++i) {
      own[i] = own_score(row + i);
      lost[i] = 0;
      ql[i] = length_of(q + (row + i) * p.dim, p.dim) * float(std::fabs(p.scale));
      const long slot = std::min<long>(p.start + row + i, p.keys - 1);
      vl[i] = length_of(v + slot * p.value, p.value);
    }
    for (long block = first; block < end; ++block)
      for (long i = 0; i < rows; ++i) {
        const float upper = ql[i] * k_most[block] + ceiling(row + i, block);
        lost[i] += COLUMNS * at_most_exp(upper - own[i]) * std::max(1.0f, v_most[block] / vl[i]);
        if (!(lost[i] <= SMALL)) return block;
      }
    return end;
  }

  // Call use(j, x, n) for eight keys from j on that lie on line n, or use(j, x, n, where) for those of them that do.
  // Along a row x falls, so lines come in turn, and most eights lie on one.
  template <class Use>
  void walk(long r, long column, Use use) const {
    const float* curve = strip + column - r + p.queries - 1;
    const float own = factor[r];
    long line = std::upper_bound(p.knots, p.knots + p.knot_count, own * curve[0]) - p.knots;
    for (long j = 0; j < COLUMNS; j += 8) {
      const v8 x = load(curve + j) * own;
      while (line > 0 && x[0] < p.knots[line - 1]) --line;
      if (line == 0 || !(x[7] < p.knots[line - 1])) {
        use(j, x, line, ~i8{});
        continue;
      }
      i8 rest = ~i8{};
      for (long n = line; n >= 0; --n) {
        const i8 here = n > 0 ? (x >= p.knots[n - 1]) & rest : rest;
        use(j, x, n, here);
        rest &= ~here;
        if (n > 0 && !(x[7] < p.knots[n - 1])) break;
      }
    }
  }

  // Add the bias to a tile of scores, forbid what is outside a row's interval.
  void add_bias(float* scores, long row, long rows, long column, const Levels& levels) const {
    for (long i = 0; i < rows; ++i) {
      float* s = scores + i * COLUMNS;
      const long r = row + i;
      if (p.kind == STRIP) {
        const float* b = strip + column - r + p.queries - 1;
        for (long j = 0; j < COLUMNS; j += 8) store(s + j, load(s + j) + load(b + j));
      } else if (p.kind == LEVEL) {
        const v8 steep = all(-slope_of(r));
        const Levels::Row own = levels.row(query_level[r]);
        for (long j = 0; j < COLUMNS; j += 8) store(s + j, load(s + j) + steep * absolute(levels.difference(own, j)));
      } else if (p.kind == LINE) {
        walk(r, column, [&](long j, v8 x, long n, i8 where) {
          const v8 bias = line_slope[n] * x + line_start[n];
          store(s + j, load(s + j) + (v8)((i8)bias & where));
        });
      }
      const long from = low[r] - column, to = high[r] - column;
      if (from > 0) std::fill(s, s + std::min<long>(from, COLUMNS), -INF);
      if (to < COLUMNS) std::fill(s + std::max<long>(to, 0), s + COLUMNS, -INF);
    }
  }

  void take_levels(long row, long column, Levels& levels) const {
    if (p.kind != LEVEL) return;
    const long count = std::min<long>(COLUMNS, p.keys - column);
    levels.behind = column + COLUMNS <= p.start + row;
    levels.ref = key_level[column + count - 1];
    for (long j = 0; j < COLUMNS; ++j) {
      levels.exact[j] = j < count ? key_level[column + j] : 0;
      levels.relative[j] = float(levels.exact[j] - levels.ref);
    }
  }
};

void forward_rows(const Head& h, long row) {
  const Problem& p = h.p;
  const long rows = std::min<long>(ROWS, p.queries - row), index = h.batch * p.heads + h.head;
  alignas(32) float scores[ROWS * COLUMNS], most[ROWS], total[ROWS];
  Levels levels;
  std::vector<float> scaled(rows * p.dim), block(rows * p.value, 0.0f);
  for (long n = 0; n < rows * p.dim; ++n) scaled[n] = h.q[row * p.dim + n] * float(p.scale);
  std::fill(most, most + rows, -INF);
  std::fill(total, total + rows, 0.0f);
  long first, last;
  h.span(row, rows, first, last);
  first = h.first_needed(row, rows, first);
  for (long b = last - 1; b >= first; --b) {
    const long column = b * COLUMNS, count = std::min<long>(COLUMNS, p.keys - column);
    product<false>(scaled.data(), p.dim, h.k_panels.data() + column * p.dim, PANEL, PANEL * p.dim, scores, COLUMNS, rows,
                   COLUMNS, p.dim, false);
    h.take_levels(row, column, levels);
    h.add_bias(scores, row, rows, column, levels);
    for (long i = 0; i < rows; ++i) {
      float* s = scores + i * COLUMNS;
      v8 top = load(s);
      for (long j = 8; j < COLUMNS; j += 8) {
        const v8 x = load(s + j);
        top = pick(x > top, x, top);
      }
      const float peak = std::max(most[i], largest(top));
      const float shift = peak == -INF ? 0 : peak;
      v8 added = all(0);
      for (long j = 0; j < COLUMNS; j += 8) {
        const v8 x = exponential(load(s + j) - shift);
        store(s + j, x);
        added += x;
      }
      if (peak > most[i] && most[i] != -INF) {
        const float fade = std::exp(most[i] - peak);
        total[i] *= fade;
        for (long d = 0; d < p.value; d += 8) store(&block[i * p.value + d], load(&block[i * p.value + d]) * fade);
      }
      most[i] = peak;
      total[i] += sum(added);
    }
    product<false>(scores, COLUMNS, h.v + column * p.value, p.value, PANEL, block.data(), p.value, rows, p.value, count,
                   true);
  }
  for (long i = 0; i < rows; ++i) {
    const bool dead = total[i] == 0;
    float* to = p.out + (index * p.queries + row + i) * p.value;
    for (long d = 0; d < p.value; ++d) to[d] = dead ? 0 : block[i * p.value + d] / total[i];
    p.lse[index * p.queries + row + i] = dead ? INF : most[i] + std::log(total[i]);
  }
  if (p.visited) __atomic_fetch_add(&p.visited[index], std::max<long>(last - first, 0) * COLUMNS * rows, __ATOMIC_RELAXED);
}

// Backward: the first block that every block of rows visits. A row's loss is measured against its own key's share of
// d_q; a block of keys' loss, to all rows that skip it, against what its own rows give to d_v, d_k and the level.
std::vector<long> backward_starts(const Head& h, const float* delta) {
  const Problem& p = h.p;
  const long index = h.batch * p.heads + h.head, count = (p.queries + ROWS - 1) / ROWS;
  std::vector<long> starts(count);
  std::vector<float> lost(count * h.blocks * 3, 0.0f), kept(h.blocks * 3, 0.0f);
  for (long n = 0; n < count; ++n) {
    const long row = n * ROWS, rows = std::min<long>(ROWS, p.queries - row);
    long first, last;
    h.span(row, rows, first, last);
    starts[n] = first;
    if (!p.skip || p.kind == NONE) continue;
    const long end = h.behind(row, first);
    float of_row[ROWS], own[ROWS], up[ROWS], ql[ROWS], kl[ROWS];
    for (long i = 0; i < rows; ++i) {
      const long r = row + i, slot = std::min<long>(p.start + r, p.keys - 1);
      up[i] = length_of(p.d_out + (index * p.queries + r) * p.value, p.value);
      ql[i] = length_of(h.q + r * p.dim, p.dim) * float(std::fabs(p.scale));
      kl[i] = length_of(h.k + slot * p.dim, p.dim);
      const float weight = std::exp(h.own_score(r) - p.lse[index * p.queries + r]);
      const float steep = p.kind == LEVEL ? h.slope_of(r) : 1.0f;
      own[i] = weight * (up[i] * length_of(h.v + slot * p.value, p.value) + std::fabs(delta[r]));
      of_row[i] = 0;
      float* keep = &kept[slot / COLUMNS * 3];
      const float gives[3] = {weight * up[i], own[i] * ql[i], own[i] * steep};
      for (int g = 0; g < 3; ++g) keep[g] = std::max(keep[g], gives[g]);
    }
    long block = first;
    for (; block < end; ++block) {
      float* col = &lost[(n * h.blocks + block) * 3];
      bool fits = true;
      for (long i = 0; i < rows && fits; ++i) {
        const long r = row + i;
        const float bias = h.ceiling(r, block);
        const float share = at_most_exp(ql[i] * h.k_most[block] + bias - p.lse[index * p.queries + r]);
        const float part = share * (up[i] * h.v_most[block] + std::fabs(delta[r]));
        const float wide = std::max(1.0f, h.k_most[block] / kl[i]) * (1.0f + std::fabs(bias));
        of_row[i] += COLUMNS * part * wide;
        fits = of_row[i] <= SMALL * own[i];
        const float steep = p.kind == LEVEL ? h.slope_of(r) : 1.0f;
        col[0] += share * up[i];
        col[1] += part * ql[i];
        col[2] += part * steep;
      }
      if (!fits) break;
    }
    starts[n] = block;
  }
  // From the last rows, which lose least, to the first: a block that would lose too much is kept from there on.
  if (p.skip && p.kind != NONE) {
    std::vector<float> total(h.blocks * 3, 0.0f);
    for (long n = count - 1; n >= 0; --n)
      for (long block = 0; block < starts[n]; ++block) {
        bool fits = true;
        for (int g = 0; g < 3; ++g)
          fits = fits && total[block * 3 + g] + lost[(n * h.blocks + block) * 3 + g] <= SMALL * kept[block * 3 + g];
        if (!fits) {
          starts[n] = block;
          break;
        }
        for (int g = 0; g < 3; ++g) total[block * 3 + g] += lost[(n * h.blocks + block) * 3 + g];
      }
  }
  return starts;
}

// The gradients of slopes and intercepts, by line.
struct LineSums {
  v8 slope[LINES], start[LINES];
};

// The gradient of a tile of scores taken into that of the bias.
void collect(const Head& h, const float* d_scores, long row, long rows, long column, const Levels& levels,
             LineSums& sums) {
  const Problem& p = h.p;
  const long index = h.batch * p.heads + h.head, count = std::min<long>(COLUMNS, p.keys - column);
  alignas(32) float of_keys[COLUMNS] = {};
  for (long i = 0; i < rows; ++i) {
    const float* d = d_scores + i * COLUMNS;
    const long r = row + i;
    if (p.kind == LINE) {
      float* to = p.d_strip + index * h.strip_length() + column - r + p.queries - 1;
      const float own = h.factor[r];
      v8 of_factor = all(0);
      h.walk(r, column, [&](long j, v8 x, long n, i8 where) {
        const v8 here = (v8)((i8)load(d + j) & where), of_x = here * h.line_slope[n];
        sums.slope[n] += here * x;
        sums.start[n] += here;
        of_factor += of_x * load(h.strip + column - r + p.queries - 1 + j);
        store(to + j, load(to + j) + of_x * own);
      });
      p.d_factor[index * p.queries + r] += sum(of_factor);
      continue;
    }
    if (p.kind == STRIP) {
      float* to = p.d_strip + index * h.strip_length() + column - r + p.queries - 1;
      for (long j = 0; j < COLUMNS; j += 8) store(to + j, load(to + j) + load(d + j));
      continue;
    }
    const v8 steep = all(h.slope_of(r));
    const Levels::Row own = levels.row(h.query_level[r]);
    v8 way = all(0), sign = all(0);
    for (long j = 0; j < COLUMNS; j += 8) {
      const v8 t = levels.difference(own, j), x = load(d + j);
      const v8 signed_x = pick(t > 0.0f, x, pick(t < 0.0f, -x, all(0)));
      way += x * absolute(t);
      sign += signed_x;
      store(of_keys + j, load(of_keys + j) + steep * signed_x);
    }
    p.d_slope[index * p.queries + r] -= sum(way);
    p.d_query_level[index * p.queries + r] -= double(h.slope_of(r)) * sum(sign);
  }
  if (p.kind == LEVEL)
    for (long j = 0; j < count; ++j) p.d_key_level[index * p.keys + column + j] += of_keys[j];
}

void backward_head(const Head& h) {
  const Problem& p = h.p;
  const long index = h.batch * p.heads + h.head;
  const float *d_out = p.d_out + index * p.queries * p.value, *out = p.out + index * p.queries * p.value;
  const float* lse = p.lse + index * p.queries;
  float *d_q = p.d_q + index * p.queries * p.dim, *d_k = p.d_k + index * p.keys * p.dim,
        *d_v = p.d_v + index * p.keys * p.value;
  alignas(32) float weights[ROWS * COLUMNS], d_scores[ROWS * COLUMNS];
  Levels levels;
  LineSums sums;
  std::vector<double> of_slope(p.knot_count + 1), of_start(p.knot_count + 1);
  std::vector<float> scaled(ROWS * p.dim), delta(p.queries);
  for (long i = 0; i < p.queries; ++i) delta[i] = dot(d_out + i * p.value, out + i * p.value, p.value);
  const std::vector<long> starts = backward_starts(h, delta.data());
  for (long row = 0; row < p.queries; row += ROWS) {
    const long rows = std::min<long>(ROWS, p.queries - row);
    for (long n = 0; n < rows * p.dim; ++n) scaled[n] = h.q[row * p.dim + n] * float(p.scale);
    if (p.kind == LINE) sums = {};
    long first, last;
    h.span(row, rows, first, last);
    for (long b = last - 1; b >= starts[row / ROWS]; --b) {
      const long column = b * COLUMNS, count = std::min<long>(COLUMNS, p.keys - column);
      h.take_levels(row, column, levels);
      product<false>(scaled.data(), p.dim, h.k_panels.data() + column * p.dim, PANEL, PANEL * p.dim, weights, COLUMNS,
                     rows, COLUMNS, p.dim, false);
      h.add_bias(weights, row, rows, column, levels);
      product<false>(d_out + row * p.value, p.value, h.v_panels.data() + column * p.value, PANEL, PANEL * p.value,
                     d_scores, COLUMNS, rows, COLUMNS, p.value, false);
      for (long i = 0; i < rows; ++i) {
        float *w = weights + i * COLUMNS, *d = d_scores + i * COLUMNS;
        const v8 shift = all(lse[row + i]), drop = all(delta[row + i]);
        for (long j = 0; j < COLUMNS; j += 8) {
          const v8 x = exponential(load(w + j) - shift);
          store(w + j, x);
          store(d + j, x * (load(d + j) - drop));
        }
      }
      product<true>(weights, COLUMNS, d_out + row * p.value, p.value, PANEL, d_v + column * p.value, p.value, count,
                    p.value, rows, true);
      product<true>(d_scores, COLUMNS, scaled.data(), p.dim, PANEL, d_k + column * p.dim, p.dim, count, p.dim, rows, true);
      product<false>(d_scores, COLUMNS, h.k + column * p.dim, p.dim, PANEL, d_q + row * p.dim, p.dim, rows, p.dim, count,
                     true);
      if (p.learned) collect(h, d_scores, row, rows, column, levels, sums);
    }
    for (long n = 0; n < rows * p.dim; ++n) d_q[row * p.dim + n] *= float(p.scale);
    // A block of rows adds up by itself first: in one long sum of float32 the last terms would drown.
    for (long n = 0; p.kind == LINE && p.learned && n <= p.knot_count; ++n) {
      of_slope[n] += sum(sums.slope[n]);
      of_start[n] += sum(sums.start[n]);
    }
  }
  for (long n = 0; p.kind == LINE && p.learned && n <= p.knot_count; ++n) {
    p.d_line_slope[index * (p.knot_count + 1) + n] = float(of_slope[n]);
    p.d_line_start[index * (p.knot_count + 1) + n] = float(of_start[n]);
  }
}

}  // namespace

extern "C" {

void lengthwise_forward(const Problem* p) {
  share(p->threads, p->batch * p->heads, [&](long index) {
    const Head head(*p, index, false);
    for (long row = 0; row < p->queries; row += ROWS) forward_rows(head, row);
  });
}

void lengthwise_backward(const Problem* p) {
  share(p->threads, p->batch * p->heads, [&](long index) { backward_head(Head(*p, index, true)); });
}

}
