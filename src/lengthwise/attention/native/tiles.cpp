// Attention in tiles for float32 on CPUs, where one thread has one head to itself and everything between two products
// stays in its cache.
//
//   content[i, j] = scale q[i] . k[j], or softcap tanh(scale q[i] . k[j] / softcap)
//   scores[i, j]  = logit_scale[i] (content[i, j] + the sum of the terms of the bias)
//                   for the keys in one of row i's intervals that are not hidden as padding
//   a term        = strip[j - i + queries - 1],
//                   or rows[i] . profiles[:, j - i + ...], or the same with rows[j]: profiles.h,
//                   or -slope[i] curve(query_level[i] - key_level[j]), where the curve of d is |d| or log(1 + d^2),
//                   or line_slope[n] x + line_start[n] with x = factor[i] strip[j - i + queries - 1], n knots being <= x
//
// Forward keeps a running maximum and sum per row, which begin with the sink; backward starts from the log-sum-exp.
// Levels are float64, and their differences are taken before they are rounded, or relative to the block where it lies
// behind all rows. Far keys are skipped where a bound shows that they cannot matter: attention/call.py has the
// argument, this file the inequalities row by row. Plain C++ with vectors of eight floats.

#include <cmath>

#include "profiles.h"
#include "softcap.h"
#include "vectors.h"

namespace {

constexpr int ROWS = 96, COLUMNS = 128, TERMS = 4, AT_ONCE = 4;
constexpr float SMALL = 1.0f / (1 << 25);  // half a unit in the last place of float32

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

// What Python hands over; tiles.py and tile_terms.py have the same fields in the same order. All arrays are contiguous.
struct TermRecord {
  int64_t kind, learned, strip_batches, strip_heads, level_batches, level_heads;
  int64_t slope_batches, slope_heads, slope_queries, factor_batches, knot_count;
  int64_t row_batches, row_heads, profile_heads, profile_count, profile_length, of_keys, is_zero, origin_batches;
  const float* strip;
  const double *query_level, *key_level;
  const float *slope, *factor, *knots, *line_slope, *line_start;
  const float *rows, *by_profile, *by_distance;  // (.., token, profile), (head, profile, distance), (head, distance, profile)
  const int64_t* origin;
  float* d_strip;
  double *d_query_level, *d_key_level;
  float *d_slope, *d_factor, *d_line_slope, *d_line_start, *d_rows, *d_profiles;
};

struct Problem {
  int64_t batch, heads, group, queries, keys, dim, value, start, bands, mask_batches, skip, threads, term_count;
  double scale, softcap;  // a softcap of 0 is none
  const float *q, *k, *v;
  const int32_t *low, *high;  // (bands, batch, queries), in rising order where they are not empty
  const uint8_t* key_mask;
  const float *logit_scale, *sink;  // (batch, heads, queries)
  float *out, *lse, *peak, *log_total;  // lse = peak + log_total, apart because float32 would lose a large peak's rest
  const float *d_out, *d_lse;
  float *d_q, *d_k, *d_v, *d_logit_scale, *d_sink;
  int64_t* visited;  // keys visited, by sequence and head
  TermRecord terms[TERMS];
};

namespace {

enum Kind { STRIP = 1, LEVEL = 2, LOG_LEVEL = 3, LINE = 4, PROFILE = 5 };
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

  // Call use(j, differences) for AT_ONCE times eight keys from j on.
  template <class Use>
  void each(double own, Use use) const {
    v8 out[AT_ONCE];
    if (behind) {
      const v8 level = all(float(own - ref));
      for (long j = 0; j < COLUMNS; j += 8 * AT_ONCE) {
#pragma GCC unroll 4
        for (int n = 0; n < AT_ONCE; ++n) out[n] = level - load(relative + j + 8 * n);
        use(j, out);
      }
      return;
    }
    for (long j = 0; j < COLUMNS; j += 8 * AT_ONCE) {
#pragma GCC unroll 4
      for (int n = 0; n < AT_ONCE; ++n) {
        const v4d first = own - *reinterpret_cast<const v4d*>(exact + j + 8 * n);
        const v4d second = own - *reinterpret_cast<const v4d*>(exact + j + 8 * n + 4);
        const v4 parts[2] = {__builtin_convertvector(first, v4), __builtin_convertvector(second, v4)};
        std::memcpy(&out[n], parts, sizeof out[n]);
      }
      use(j, out);
    }
  }
};

using Profiles = Mixture<ROWS, COLUMNS>;

// The gradients of slopes and intercepts, by line.
struct LineSums {
  v8 slope[LINES], start[LINES];
};

// What belongs to one tile, and of the row at hand what the backward pass needs again.
struct Tile {
  Levels levels[TERMS];
  alignas(32) float of_keys[TERMS][COLUMNS];  // the gradient of the keys' levels
  alignas(32) float curve[TERMS][COLUMNS];    // of a row: differences of levels, or their logarithmic curve
  alignas(32) float rate[TERMS][COLUMNS];     // how fast that curve rises
  alignas(32) float content[COLUMNS], bias[COLUMNS], fall[COLUMNS];  // fall: how much of content's gradient passes
  alignas(32) int32_t hidden[COLUMNS];  // -1 where padding hides a key
  bool holes;
  Profiles::Tile mixed[TERMS];
};

// One term of the bias for one head of one sequence.
struct Term {
  const TermRecord* record;
  long kind, queries, keys, index;
  const float* strip = nullptr;
  const double *query_level = nullptr, *key_level = nullptr;
  const float* slope = nullptr;
  long slope_step = 0;
  const float *factor = nullptr, *line_slope = nullptr, *line_start = nullptr;
  std::vector<float> strip_most;   // the largest entry so far away or more
  std::vector<double> level_most;  // the highest level up to the end of a block
  Profiles profiles;
  float profile_most = 0;       // the length of the longest column of the profiles
  std::vector<float> row_most;  // of rows of keys, the length of the longest up to the end of a block

  Term(const Problem& p, const TermRecord& r, long batch, long head)
      : record(&r), kind(r.kind), queries(p.queries), keys(p.keys), index(batch * p.heads + head) {
    auto row = [&](long batches, long heads) { return (batches > 1 ? batch : 0) * heads + (heads > 1 ? head : 0); };
    if (kind == STRIP || kind == LINE) strip = r.strip + row(r.strip_batches, r.strip_heads) * strip_length();
    if (kind == LINE) {
      factor = r.factor + (r.factor_batches > 1 ? batch : 0) * queries;
      line_slope = r.line_slope + head * (r.knot_count + 1);
      line_start = r.line_start + head * (r.knot_count + 1);
    } else if (kind == PROFILE) {
      const long tokens = r.of_keys ? keys : queries, size = r.profile_count * r.profile_length;
      const long shared = (r.profile_heads > 1 ? head : 0) * size;
      profiles.rows = r.rows + row(r.row_batches, r.row_heads) * tokens * r.profile_count;
      profiles.by_profile = r.by_profile + shared;
      profiles.by_distance = r.by_distance + shared;
      profiles.count = r.profile_count, profiles.length = r.profile_length;
      profiles.origin = r.origin[r.origin_batches > 1 ? batch : 0];
      profiles.of_keys = r.of_keys, profiles.is_zero = r.is_zero;
      if (r.d_rows) profiles.d_rows = r.d_rows + index * tokens * r.profile_count;
      if (r.d_profiles) profiles.d_profiles = r.d_profiles + index * size;
    } else if (is_level()) {
      query_level = r.query_level + row(r.level_batches, r.level_heads) * queries;
      key_level = r.key_level + row(r.level_batches, r.level_heads) * keys;
      slope = r.slope + row(r.slope_batches, r.slope_heads) * r.slope_queries;
      slope_step = r.slope_queries > 1;
    }
  }

  bool is_level() const { return kind == LEVEL || kind == LOG_LEVEL; }
  long strip_length() const { return queries + keys + COLUMNS; }
  float slope_of(long i) const { return slope[i * slope_step]; }
  const float* along(long i, long column) const { return strip + column - i + queries - 1; }

  double curve(double difference) const {
    return kind == LEVEL ? std::fabs(difference) : std::log1p(difference * difference);
  }

  float at(long i, long j) const {
    if (kind == STRIP) return *along(i, j);
    if (kind == PROFILE && profiles.is_zero && !profiles.is_inside(profiles.column_of(i, j))) return 0;
    if (kind == PROFILE) return profiles.dot(row_of(i, j), profiles.profile(i, j));
    return is_level() ? -slope_of(i) * float(curve(query_level[i] - key_level[j])) : 0;
  }

  const float* row_of(long i, long j) const { return profiles.rows + (profiles.of_keys ? j : i) * profiles.count; }
  float row_length(long i, long j) const { return length_of(row_of(i, j), profiles.count); }

  template <class Hidden>
  void bound(long blocks, Hidden hidden) {
    if (kind == PROFILE) {
      for (long u = 0; u < profiles.length; ++u) {
        const float own = length_of(profiles.by_distance + u * profiles.count, profiles.count);
        if (!(own <= profile_most)) profile_most = own;
      }
      row_most.assign(profiles.of_keys ? blocks : 0, 0);
      for (long j = 0; profiles.of_keys && j < keys; ++j)
        if (const float own = hidden(j) ? 0 : row_length(0, j); !(own <= row_most[j / COLUMNS])) row_most[j / COLUMNS] = own;
      for (long block = 1; profiles.of_keys && block < blocks; ++block)
        if (!(row_most[block] >= row_most[block - 1])) row_most[block] = row_most[block - 1];
    }
    if (kind == STRIP) {
      strip_most.resize(queries + keys);
      float most = -INF;
      for (long x = 0; x < queries + keys - 1; ++x) {
        if (!(strip[x] <= most)) most = strip[x];  // a NaN stays: it must never look small
        strip_most[x] = most;
      }
    }
    if (!is_level()) return;
    level_most.assign(blocks, -std::numeric_limits<double>::infinity());
    for (long j = 0; j < keys; ++j)
      if (!hidden(j) && !(key_level[j] <= level_most[j / COLUMNS])) level_most[j / COLUMNS] = key_level[j];
    for (long block = 1; block < blocks; ++block)
      if (!(level_most[block] >= level_most[block - 1])) level_most[block] = level_most[block - 1];
  }

  // The largest bias between a row and the keys up to the end of a block that lies behind it.
  float ceiling(long i, long block) const {
    const long last = std::min<long>((block + 1) * COLUMNS, keys) - 1;
    if (kind == STRIP) return strip_most[last - i + queries - 1];
    if (kind == PROFILE) return profile_most * (profiles.of_keys ? row_most[block] : row_length(i, 0));
    const double above = query_level[i] - level_most[block];
    const float steep = slope_of(i);
    if (!(steep >= 0)) return INF;
    return above > 0 ? float(-double(steep) * curve(above)) : (above == above ? 0 : float(above));
  }

  // How much the gradient of a level, a profile or a key's row can be of that of a score on a block of keys.
  float steepness(long i, long block) const {
    if (kind != PROFILE) return is_level() ? slope_of(i) : 1.0f;
    return profiles.of_keys ? std::max(row_most[block], profile_most) : row_length(i, 0);
  }

  // And how much it is of the score on the key in the own slot, at least.
  float own_steepness(long i, long slot) const {
    if (kind != PROFILE) return steepness(i, 0);
    const float profile = length_of(profiles.profile(i, slot), profiles.count);
    return profiles.of_keys ? std::min(row_length(i, slot), profile) * 0.99f : row_length(i, 0);
  }

  // By how much more than its own key a block of keys can weigh in the gradient of a query's row.
  float row_weight(long i, long slot) const {
    if (kind != PROFILE || profiles.of_keys) return 1;
    return std::max(1.0f, 1.01f * profile_most / length_of(profiles.profile(i, slot), profiles.count));
  }

  void take_levels(long start, long row, long column, Levels& levels) const {
    const long count = std::min<long>(COLUMNS, keys - column);
    levels.behind = column + COLUMNS <= start + row;
    levels.ref = key_level[column + count - 1];
    for (long j = 0; j < COLUMNS; ++j) {
      levels.exact[j] = j < count ? key_level[column + j] : 0;
      levels.relative[j] = float(levels.exact[j] - levels.ref);
    }
  }

  // Call use(j, x, n, where) for those of eight keys from j on that lie on line n.
  // Along a row x falls, so lines come in turn, and most eights lie on one.
  template <class Use>
  void walk(long r, long column, Use use) const {
    const float* curve = along(r, column);
    const float own = factor[r], *knots = record->knots;
    long line = std::upper_bound(knots, knots + record->knot_count, own * curve[0]) - knots;
    for (long j = 0; j < COLUMNS; j += 8) {
      const v8 x = load(curve + j) * own;
      while (line > 0 && x[0] < knots[line - 1]) --line;
      if (line == 0 || !(x[7] < knots[line - 1])) {
        use(j, x, line, ~i8{});
        continue;
      }
      i8 rest = ~i8{};
      for (long n = line; n >= 0; --n) {
        const i8 here = n > 0 ? (x >= knots[n - 1]) & rest : rest;
        use(j, x, n, here);
        rest &= ~here;
        if (n > 0 && !(x[7] < knots[n - 1])) break;
      }
    }
  }

  // Add m times the bias of a row to `to`; backward, remember the curve of the levels.
  template <bool BACKWARD>
  void add(float* to, float m, long r, long column, Tile& tile, int n) const {
    if (kind == STRIP || kind == PROFILE) {
      const float* b = kind == STRIP ? along(r, column) : tile.mixed[n].bias + (r - tile.mixed[n].row) * Profiles::STEP;
      const v8 factor = all(m);
      for (long j = 0; j < COLUMNS; j += 8) store(to + j, load(to + j) + factor * load(b + j));
    } else if (kind == LEVEL) {
      const v8 steep = all(-slope_of(r) * m);
      float* kept = tile.curve[n];
      tile.levels[n].each(query_level[r], [=](long j, v8 (&t)[AT_ONCE]) {
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; ++i, j += 8) {
          if (BACKWARD) store(kept + j, t[i]);
          store(to + j, load(to + j) + steep * absolute(t[i]));
        }
      });
    } else if (kind == LOG_LEVEL) {
      const v8 steep = all(-slope_of(r) * m);
      float *kept = tile.curve[n], *rate = tile.rate[n];
      tile.levels[n].each(query_level[r], [=](long j, v8 (&t)[AT_ONCE]) {
        v8 log[AT_ONCE];
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; ++i) {
          log[i] = t[i] * t[i];
          if (BACKWARD) store(rate + j + 8 * i, (t[i] + t[i]) / (log[i] + 1.0f));
        }
        logs_of_1p(log);
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; ++i, j += 8) {
          if (BACKWARD) store(kept + j, log[i]);
          store(to + j, load(to + j) + steep * log[i]);
        }
      });
    } else {
      const v8 factor = all(m);
      walk(r, column, [&](long j, v8 x, long line, i8 where) {
        const v8 bias = line_slope[line] * x + line_start[line];
        store(to + j, load(to + j) + factor * (v8)((i8)bias & where));
      });
    }
  }

  // The gradient of a row's scores taken into that of the bias.
  void collect(const float* d, float m, long r, long column, Tile& tile, int n, LineSums* sums) const {
    if (kind == PROFILE) {
      float* to = tile.mixed[n].d_bias + (r - tile.mixed[n].row) * Profiles::STEP;
      const v8 factor = all(m);
      for (long j = 0; j < COLUMNS; j += 8) store(to + j, factor * load(d + j));
      return;
    }
    if (kind == STRIP) {
      float* to = record->d_strip + index * strip_length() + (along(r, column) - strip);
      const v8 factor = all(m);
      for (long j = 0; j < COLUMNS; j += 8) store(to + j, load(to + j) + factor * load(d + j));
      return;
    }
    if (kind == LINE) {
      const float* curve = along(r, column);
      float* to = record->d_strip + index * strip_length() + (curve - strip);
      const float own = factor[r];
      v8 of_factor = all(0);
      walk(r, column, [&](long j, v8 x, long line, i8 where) {
        const v8 here = (v8)((i8)(load(d + j) * m) & where), of_x = here * line_slope[line];
        sums->slope[line] += here * x;
        sums->start[line] += here;
        of_factor += of_x * load(curve + j);
        store(to + j, load(to + j) + of_x * own);
      });
      record->d_factor[index * queries + r] += sum(of_factor);
      return;
    }
    const v8 steep = all(slope_of(r) * m);
    float* of_keys = tile.of_keys[n];
    const float *curve = tile.curve[n], *rate = tile.rate[n];
    v8 way = all(0), climb = all(0);
    if (kind == LEVEL) {
      for (long j = 0; j < COLUMNS; j += 8) {
        const v8 t = load(curve + j), x = load(d + j);
        const v8 signed_x = pick(t > 0.0f, x, pick(t < 0.0f, -x, all(0)));
        way += x * absolute(t);
        climb += signed_x;
        store(of_keys + j, load(of_keys + j) + steep * signed_x);
      }
    } else {
      for (long j = 0; j < COLUMNS; j += 8) {
        const v8 x = load(d + j), risen = x * load(rate + j);
        way += x * load(curve + j);
        climb += risen;
        store(of_keys + j, load(of_keys + j) + steep * risen);
      }
    }
    record->d_slope[index * queries + r] -= m * sum(way);
    record->d_query_level[index * queries + r] -= double(slope_of(r)) * m * sum(climb);
  }
};

// One head of one sequence.
struct Head {
  const Problem& p;
  long batch, head, index, blocks;
  const float *q, *k, *v;
  const int32_t *low, *high;
  const uint8_t* key_mask;
  const float *logit_scale, *sink;
  float cap;  // 0 for none
  Softcap softcap;
  std::vector<Term> terms;
  std::vector<float> k_panels, v_panels;  // keys and values, sixteen of them side by side
  std::vector<float> k_most, v_most;      // largest length in a block of keys
  std::vector<char> holes;                // of a block of keys: 0 none is hidden as padding, 1 some, 2 all

  Head(const Problem& problem, long index, bool backward)
      : p(problem), batch(index / problem.heads), head(index % problem.heads), index(index),
        blocks((problem.keys + COLUMNS - 1) / COLUMNS), cap(float(problem.softcap)), softcap(cap) {
    const long kv = batch * (p.heads / p.group) + head / p.group;
    q = p.q + index * p.queries * p.dim;
    k = p.k + kv * p.keys * p.dim;
    v = p.v + kv * p.keys * p.value;
    low = p.low + batch * p.queries;
    high = p.high + batch * p.queries;
    key_mask = p.key_mask ? p.key_mask + (p.mask_batches > 1 ? batch : 0) * p.keys : nullptr;
    logit_scale = p.logit_scale ? p.logit_scale + index * p.queries : nullptr;
    sink = p.sink ? p.sink + index * p.queries : nullptr;
    for (long n = 0; n < p.term_count; ++n) terms.emplace_back(p, p.terms[n], batch, head);
    for (Term& term : terms)
      if (term.kind == PROFILE && term.profiles.of_keys) pack(term.profiles.rows, term.profiles.count, term.profiles.panels);
    pack(k, p.dim, k_panels);
    if (backward) pack(v, p.value, v_panels);
    holes.assign(blocks, 0);
    for (long block = 0; key_mask && block < blocks; ++block) {
      const long from = block * COLUMNS, to = std::min<long>(from + COLUMNS, p.keys);
      const long seen = std::count(key_mask + from, key_mask + to, 1);
      holes[block] = seen == to - from ? 0 : seen ? 1 : 2;
    }
    if (may_skip() || cap > 0) bound();
  }

  float factor(long i) const { return logit_scale ? logit_scale[i] : 1.0f; }
  bool hidden(long j) const { return key_mask && !key_mask[j]; }
  long band(long b, long i) const { return b * p.batch * p.queries + i; }

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
    for (long j = 0; j < p.keys; ++j) {
      if (hidden(j)) continue;
      const long block = j / COLUMNS;
      // A NaN stays: it must never look small.
      const float of_k = length_of(k + j * p.dim, p.dim), of_v = may_skip() ? length_of(v + j * p.value, p.value) : 0;
      if (!(of_k <= k_most[block])) k_most[block] = of_k;
      if (!(of_v <= v_most[block])) v_most[block] = of_v;
    }
    for (Term& term : terms)
      if (may_skip()) term.bound(blocks, [&](long j) { return hidden(j); });
  }

  bool sees_nothing(long i) const {
    for (long b = 0; b < p.bands; ++b)
      if (low[band(b, i)] < high[band(b, i)]) return false;
    return true;
  }

  bool sees(long i, long j) const {
    if (j < 0 || j >= p.keys || hidden(j)) return false;
    for (long b = 0; b < p.bands; ++b)
      if (low[band(b, i)] <= j && j < high[band(b, i)]) return true;
    return false;
  }

  // The largest score of a row on the keys of a block that lies behind it; `biases` is how large the terms may be.
  float upper(long i, long block, float q_length, float& biases) const {
    float bias = 0;
    biases = 0;
    for (const Term& term : terms) {
      const float most = term.ceiling(i, block);
      bias += most;
      biases += std::fabs(most);
    }
    float content = q_length * k_most[block];
    if (cap > 0 && content > cap) content = cap;
    return factor(i) * (content + bias);
  }

  // A row's score on the key in its own slot, which it must see, and how much of its gradient passes the cap.
  float own_score(long i, float& passes) const {
    const long own = p.start + i;
    float score = dot(q + i * p.dim, k + own * p.dim, p.dim) * float(p.scale);
    passes = 1;
    if (cap > 0) {
      const float t = std::tanh(score / cap);
      score = cap * t;
      passes = 1 - t * t;
    }
    for (const Term& term : terms) score += term.at(i, own);
    return factor(i) * score;
  }

  float q_length(long i) const { return length_of(q + i * p.dim, p.dim) * float(std::fabs(p.scale)); }
  bool may_skip() const { return p.skip && !terms.empty(); }

  // The blocks of keys that a block of rows has to visit, from `first` on, before anything is skipped.
  void span(long row, long rows, long& first, long& last) const {
    long from = p.keys, to = 0;
    for (long b = 0; b < p.bands; ++b)
      for (long i = band(b, row); i < band(b, row) + rows; ++i) {
        if (low[i] >= high[i]) continue;
        from = std::min<long>(from, low[i]);
        to = std::max<long>(to, high[i]);
      }
    first = from / COLUMNS;
    last = (to + COLUMNS - 1) / COLUMNS;
  }

  // Whether some row of a block sees some key of another; with one interval per row `span` has said so.
  bool meets(long row, long rows, long block) const {
    if (holes[block] == 2) return false;
    if (p.bands == 1) return true;
    const long from = block * COLUMNS, to = from + COLUMNS;
    for (long b = 0; b < p.bands; ++b)
      for (long i = band(b, row); i < band(b, row) + rows; ++i)
        if (low[i] < high[i] && low[i] < to && high[i] > from) return true;
    return false;
  }

  // How many blocks from `first` on lie wholly behind a block of rows.
  long behind(long row, long first) const {
    const long slot = std::max<long>(p.start + row, 0);
    return std::max(first, std::min(slot / COLUMNS, blocks));
  }

  // Forward: the first block that matters to some row. What a row loses is measured against its own key's share.
  long first_needed(long row, long rows, long first) const {
    const long end = behind(row, first);
    if (!may_skip() || end <= first) return first;
    float own[ROWS], lost[ROWS], ql[ROWS], vl[ROWS], unused;
    for (long i = 0; i < rows; ++i) {
      const long r = row + i;
      lost[i] = 0;
      own[i] = INF;
      vl[i] = 1;
      ql[i] = 0;
      if (sees_nothing(r)) continue;  // it loses nothing
      if (!sees(r, p.start + r) || !(factor(r) > 0)) return first;
      own[i] = own_score(r, unused);
      ql[i] = q_length(r);
      vl[i] = length_of(v + (p.start + r) * p.value, p.value);
    }
    for (long block = first; block < end; ++block)
      for (long i = 0; i < rows; ++i) {
        if (own[i] == INF) continue;
        const float most = upper(row + i, block, ql[i], unused);
        lost[i] += COLUMNS * at_most_exp(most - own[i]) * std::max(1.0f, v_most[block] / vl[i]);
        if (!(lost[i] <= SMALL)) return block;
      }
    return end;
  }

  void allocate(Tile& tile, bool backward) const {
    for (size_t n = 0; n < terms.size(); ++n)
      if (terms[n].kind == PROFILE) tile.mixed[n].allocate(terms[n].profiles.count, backward && terms[n].record->learned);
  }

  void begin_tile(long row, long rows, long block, Tile& tile) const {
    const long column = block * COLUMNS, count = std::min<long>(COLUMNS, p.keys - column);
    for (size_t n = 0; n < terms.size(); ++n) {
      if (terms[n].is_level()) terms[n].take_levels(p.start, row, column, tile.levels[n]);
      if (terms[n].kind == PROFILE)
        terms[n].profiles.begin(tile.mixed[n], row, rows, column, count, terms[n].record->learned);
    }
    tile.holes = holes[block];
    for (long j = 0; tile.holes && j < COLUMNS; ++j) tile.hidden[j] = column + j < p.keys && key_mask[column + j] ? 0 : -1;
  }

  // Write `value` where a row does not see a key.
  void hide(float* s, long r, long column, const Tile& tile, float value) const {
    long from = 0;
    for (long b = 0; b < p.bands; ++b) {
      const long begin = std::max<long>(low[band(b, r)] - column, from);
      const long end = std::min<long>(high[band(b, r)] - column, COLUMNS);
      if (begin >= end) continue;
      std::fill(s + from, s + begin, value);
      from = end;
    }
    std::fill(s + from, s + COLUMNS, value);
    if (!tile.holes) return;
    for (long j = 0; j < COLUMNS; j += 8)
      store(s + j, pick(*reinterpret_cast<const i8*>(tile.hidden + j), all(value), load(s + j)));
  }

  // From the products of a row and a block of keys to its scores; ql is the length of its query.
  template <bool BACKWARD>
  void score(float* s, long r, long block, float ql, Tile& tile) const {
    const long column = block * COLUMNS;
    const float m = factor(r);
    const bool apart = BACKWARD && p.d_logit_scale;  // then the sum of content and bias is needed without its factor
    if (cap > 0)
      softcap.apply(s, COLUMNS, ql * k_most[block], [=, &tile](auto capped) {
        const v8 factor = all(m), steep = all(m * capped.square);
        if (!BACKWARD && !logit_scale) {
          for (long j = 0; j < COLUMNS; j += 8) store(s + j, capped(load(s + j)));
          return;
        }
        for (long j = 0; j < COLUMNS; j += 8) {
          const v8 content = capped(load(s + j));
          if (BACKWARD) {
            store(tile.fall + j, factor - steep * (content * content));
            store(tile.content + j, content);
          }
          store(s + j, factor * content);
        }
      });
    if (!terms.empty()) {
      float* to = apart ? tile.bias : s;
      if (apart) std::fill(to, to + COLUMNS, 0.0f);
      for (size_t n = 0; n < terms.size(); ++n) terms[n].template add<BACKWARD>(to, apart ? 1.0f : m, r, column, tile, n);
      for (long j = 0; apart && j < COLUMNS; j += 8) store(s + j, load(s + j) + m * load(to + j));
    }
    hide(s, r, column, tile, -INF);
  }

  // Queries times the scale and, where no cap lies between, the row's factor.
  void scale_queries(long row, long rows, float* scaled) const {
    for (long i = 0; i < rows; ++i) {
      const float by = float(p.scale) * (cap > 0 ? 1.0f : factor(row + i));
      for (long d = 0; d < p.dim; ++d) scaled[i * p.dim + d] = q[(row + i) * p.dim + d] * by;
    }
  }
};

void forward_rows(const Head& h, long row, Tile& tile) {
  const Problem& p = h.p;
  const long rows = std::min<long>(ROWS, p.queries - row), index = h.index;
  alignas(32) float scores[ROWS * COLUMNS], most[ROWS], total[ROWS], ql[ROWS];
  std::vector<float> scaled(rows * p.dim), block(rows * p.value, 0.0f);
  h.scale_queries(row, rows, scaled.data());
  for (long i = 0; i < rows; ++i) {
    most[i] = h.sink ? h.sink[row + i] : -INF;
    total[i] = most[i] == -INF ? 0.0f : 1.0f;
    ql[i] = h.cap > 0 ? h.q_length(row + i) : 0;
  }
  long first, last, visited = 0;
  h.span(row, rows, first, last);
  first = h.first_needed(row, rows, first);
  for (long b = last - 1; b >= first; --b) {
    if (!h.meets(row, rows, b)) continue;
    const long column = b * COLUMNS, count = std::min<long>(COLUMNS, p.keys - column);
    visited += COLUMNS * rows;
    product<false>(scaled.data(), p.dim, h.k_panels.data() + column * p.dim, PANEL, PANEL * p.dim, scores, COLUMNS, rows,
                   COLUMNS, p.dim, false);
    h.begin_tile(row, rows, b, tile);
    for (long i = 0; i < rows; ++i) {
      float* s = scores + i * COLUMNS;
      h.score<false>(s, row + i, b, ql[i], tile);
      v8 top = load(s);
      for (long j = 8; j < COLUMNS; j += 8) {
        const v8 x = load(s + j);
        top = pick(x > top, x, top);
      }
      const float peak = std::max(most[i], largest(top));
      const float shift = peak == -INF ? 0 : peak;
      v8 added = all(0);
      for (long j = 0; j < COLUMNS; j += 8 * AT_ONCE) {
        v8 x[AT_ONCE];
#pragma GCC unroll 4
        for (int n = 0; n < AT_ONCE; ++n) x[n] = load(s + j + 8 * n) - shift;
        exponentials(x);
#pragma GCC unroll 4
        for (int n = 0; n < AT_ONCE; ++n) {
          store(s + j + 8 * n, x[n]);
          added += x[n];
        }
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
    const bool empty = total[i] == 0;
    float* to = p.out + (index * p.queries + row + i) * p.value;
    for (long d = 0; d < p.value; ++d) to[d] = empty ? 0 : block[i * p.value + d] / total[i];
    const long at = index * p.queries + row + i;
    p.peak[at] = empty ? -INF : most[i];
    p.log_total[at] = empty ? 0 : std::log(total[i]);
    p.lse[at] = p.peak[at] + p.log_total[at];
  }
  if (p.visited) p.visited[index] += visited;
}

// Of a row: the two parts of the log-sum-exp, as they are taken off the scores, and what is taken off the gradient of the
// weights, with the gradient of the log-sum-exp in it, so that every bound knows of that. Without keys it has neither.
struct Rests {
  std::vector<float> peak, log_total, delta;

  explicit Rests(const Head& h)
      : peak(h.p.peak + h.index * h.p.queries, h.p.peak + (h.index + 1) * h.p.queries),
        log_total(h.p.log_total + h.index * h.p.queries, h.p.log_total + (h.index + 1) * h.p.queries),
        delta(h.p.queries, 0.0f) {
    const Problem& p = h.p;
    const long first = h.index * p.queries;
    for (long i = 0; i < p.queries; ++i) {
      if (peak[i] == -INF) {
        peak[i] = INF;
        continue;
      }
      delta[i] = dot(p.d_out + (first + i) * p.value, p.out + (first + i) * p.value, p.value);
      if (p.d_lse) delta[i] -= p.d_lse[first + i];
      if (p.d_sink && h.sink[i] != -INF) p.d_sink[first + i] = -std::exp((h.sink[i] - peak[i]) - log_total[i]) * delta[i];
    }
  }

  float lse(long i) const { return peak[i] + log_total[i]; }
  bool is_finite(long i) const { return std::fabs(lse(i)) < INF && std::fabs(delta[i]) < INF; }
};

// Backward: the first block that every block of rows visits. A row's loss is measured against its own key's share of
// d_q; a block of keys' loss, to all rows that skip it, against what its own rows give to d_v, d_k and each term.
std::vector<long> backward_starts(const Head& h, const Rests& rests) {
  const Problem& p = h.p;
  const long count = (p.queries + ROWS - 1) / ROWS, sorts = 2 + (long)h.terms.size();
  std::vector<long> starts(count);
  for (long n = 0; n < count; ++n) {
    long last;
    h.span(n * ROWS, std::min<long>(ROWS, p.queries - n * ROWS), starts[n], last);
  }
  if (!h.may_skip()) return starts;
  std::vector<float> lost(count * h.blocks * sorts, 0.0f), kept(h.blocks * sorts, 0.0f);
  for (long n = 0; n < count; ++n) {
    const long row = n * ROWS, rows = std::min<long>(ROWS, p.queries - row), end = h.behind(row, starts[n]);
    float of_row[ROWS], own[ROWS], up[ROWS], ql[ROWS], kl[ROWS];
    bool seeing[ROWS], fits = true;
    for (long i = 0; i < rows; ++i) {
      const long r = row + i, slot = p.start + r;
      seeing[i] = !h.sees_nothing(r);
      if (!seeing[i]) continue;
      if (!h.sees(r, slot) || !(h.factor(r) > 0)) {
        fits = false;
        continue;
      }
      float passes;
      const float weight = std::exp(h.own_score(r, passes) - rests.lse(r)), m = h.factor(r);
      up[i] = length_of(p.d_out + (h.index * p.queries + r) * p.value, p.value);
      ql[i] = h.q_length(r);
      kl[i] = length_of(h.k + slot * p.dim, p.dim);
      const float share = weight * (up[i] * length_of(h.v + slot * p.value, p.value) + std::fabs(rests.delta[r]));
      own[i] = share * passes;
      of_row[i] = 0;
      float* keep = &kept[slot / COLUMNS * sorts];
      for (long g = 0; g < sorts; ++g) {
        const float gives = g == 0   ? weight * up[i]
                            : g == 1 ? own[i] * m * ql[i]
                                     : share * m * h.terms[g - 2].own_steepness(r, slot);
        keep[g] = std::max(keep[g], gives);
      }
    }
    for (; fits && starts[n] < end; ++starts[n]) {
      const long block = starts[n];
      float* col = &lost[(n * h.blocks + block) * sorts];
      for (long i = 0; i < rows && fits; ++i) {
        if (!seeing[i]) continue;
        const long r = row + i;
        float biases;
        const float m = h.factor(r), share = at_most_exp(h.upper(r, block, ql[i], biases) - rests.lse(r));
        const float part = share * (up[i] * h.v_most[block] + std::fabs(rests.delta[r]));
        float wide = std::max(1.0f, h.k_most[block] / kl[i]) * (1.0f + biases);
        for (const Term& term : h.terms) wide *= term.row_weight(r, p.start + r);
        of_row[i] += COLUMNS * part * wide;
        fits = of_row[i] <= SMALL * own[i];
        for (long g = 0; g < sorts; ++g)
          col[g] += g == 0 ? share * up[i] : part * m * (g == 1 ? ql[i] : h.terms[g - 2].steepness(r, block));
      }
      if (!fits) break;
    }
  }
  // From the last rows, which lose least, to the first: a block that would lose too much is kept from there on.
  std::vector<float> total(h.blocks * sorts, 0.0f);
  for (long n = count - 1; n >= 0; --n)
    for (long block = 0; block < starts[n]; ++block) {
      const float* more = &lost[(n * h.blocks + block) * sorts];
      bool fits = true;
      for (long g = 0; g < sorts; ++g) fits = fits && total[block * sorts + g] + more[g] <= SMALL * kept[block * sorts + g];
      if (!fits) {
        starts[n] = block;
        break;
      }
      for (long g = 0; g < sorts; ++g) total[block * sorts + g] += more[g];
    }
  return starts;
}

// Sums of a head's lines over all rows, in float64: in one long sum of float32 the last terms would drown.
struct LineTotals {
  LineSums sums;
  std::vector<double> slope, start;
};

// From scores and the products of d_out and v to weights and the gradient of the products of q and k, row by row, with
// the gradients of the bias and of the logit scale taken on the way.
void backward_row(const Head& h, float* w, float* d, long r, long block, float ql, const Rests& rests, Tile& tile,
                  std::vector<LineTotals>& lines) {
  const Problem& p = h.p;
  const long column = block * COLUMNS;
  const v8 peak = all(rests.peak[r]), rest = all(rests.log_total[r]), drop = all(rests.delta[r]);
  const float m = h.factor(r);
  if (h.cap > 0 && h.terms.empty() && !p.d_logit_scale) {  // nothing else is needed of the row: all of it in one go
    h.softcap.apply(w, COLUMNS, ql * h.k_most[block], [=](auto capped) {
      const v8 factor = all(m), steep = all(m * capped.square);
      const bool scaled = m != 1;
      for (long j = 0; j < COLUMNS; j += 8 * AT_ONCE) {
        v8 x[AT_ONCE], passed[AT_ONCE];
#pragma GCC unroll 4
        for (int n = 0; n < AT_ONCE; ++n) {
          const v8 content = capped(load(w + j + 8 * n));
          x[n] = ((scaled ? factor * content : content) - peak) - rest;
          passed[n] = (load(d + j + 8 * n) - drop) * (factor - steep * (content * content));
        }
        exponentials(x);
#pragma GCC unroll 4
        for (int n = 0; n < AT_ONCE; ++n) {
          store(w + j + 8 * n, x[n]);
          store(d + j + 8 * n, x[n] * passed[n]);
        }
      }
    });
    h.hide(w, r, column, tile, 0);
    h.hide(d, r, column, tile, 0);
    return;
  }
  h.score<true>(w, r, block, ql, tile);
  for (long j = 0; j < COLUMNS; j += 8 * AT_ONCE) {
    v8 x[AT_ONCE];
#pragma GCC unroll 4
    for (int n = 0; n < AT_ONCE; ++n) x[n] = (load(w + j + 8 * n) - peak) - rest;
    exponentials(x);
#pragma GCC unroll 4
    for (int n = 0; n < AT_ONCE; ++n) {
      store(w + j + 8 * n, x[n]);
      store(d + j + 8 * n, x[n] * (load(d + j + 8 * n) - drop));
    }
  }
  if (!rests.is_finite(r)) {
    h.hide(w, r, column, tile, 0);  // what is not finite stays with the keys that its row sees
    h.hide(d, r, column, tile, 0);
  }
  for (size_t n = 0; n < h.terms.size(); ++n)
    if (h.terms[n].record->learned) h.terms[n].collect(d, m, r, column, tile, n, &lines[n].sums);
  if (p.d_logit_scale && !(h.terms.empty() && h.cap == 0)) {
    v8 total = all(0);
    for (long j = 0; j < COLUMNS && !h.terms.empty(); j += 8) total += load(d + j) * load(tile.bias + j);
    for (long j = 0; j < COLUMNS && h.cap > 0; j += 8) total += load(d + j) * load(tile.content + j);
    p.d_logit_scale[h.index * p.queries + r] += sum(total);
  }
  if (h.cap == 0) return;
  for (long j = 0; j < COLUMNS; j += 8) store(d + j, load(d + j) * load(tile.fall + j));
  if (!rests.is_finite(r)) h.hide(d, r, column, tile, 0);
}

void backward_head(const Head& h) {
  const Problem& p = h.p;
  const long index = h.index;
  const float* d_out = p.d_out + index * p.queries * p.value;
  float *d_q = p.d_q + index * p.queries * p.dim, *d_k = p.d_k + index * p.keys * p.dim,
        *d_v = p.d_v + index * p.keys * p.value;
  alignas(32) float weights[ROWS * COLUMNS], d_scores[ROWS * COLUMNS];
  Tile tile;
  h.allocate(tile, true);
  std::vector<LineTotals> lines(h.terms.size());
  for (size_t n = 0; n < lines.size(); ++n) {
    const long count = h.terms[n].kind == LINE ? h.terms[n].record->knot_count + 1 : 0;
    lines[n].slope.assign(count, 0);
    lines[n].start.assign(count, 0);
  }
  std::vector<float> scaled(ROWS * p.dim);
  const Rests rests(h);
  const std::vector<long> starts = backward_starts(h, rests);
  for (long row = 0; row < p.queries; row += ROWS) {
    const long rows = std::min<long>(ROWS, p.queries - row);
    h.scale_queries(row, rows, scaled.data());
    float ql[ROWS];
    for (long i = 0; i < rows; ++i) {
      ql[i] = h.cap > 0 ? h.q_length(row + i) : 0;
      // A row that is not finite makes the gradient of a key so that it sees, and must not make that of others so.
      if (!rests.is_finite(row + i)) std::fill_n(&scaled[i * p.dim], p.dim, 0.0f);
    }
    for (LineTotals& line : lines)
      if (!line.slope.empty()) line.sums = {};
    long first, last;
    h.span(row, rows, first, last);
    for (long b = last - 1; b >= starts[row / ROWS]; --b) {
      if (!h.meets(row, rows, b)) continue;
      const long column = b * COLUMNS, count = std::min<long>(COLUMNS, p.keys - column);
      h.begin_tile(row, rows, b, tile);
      product<false>(scaled.data(), p.dim, h.k_panels.data() + column * p.dim, PANEL, PANEL * p.dim, weights, COLUMNS,
                     rows, COLUMNS, p.dim, false);
      product<false>(d_out + row * p.value, p.value, h.v_panels.data() + column * p.value, PANEL, PANEL * p.value,
                     d_scores, COLUMNS, rows, COLUMNS, p.value, false);
      for (size_t n = 0; n < h.terms.size(); ++n)
        if (h.terms[n].is_level()) std::fill(tile.of_keys[n], tile.of_keys[n] + COLUMNS, 0.0f);
      for (long i = 0; i < rows; ++i)
        backward_row(h, weights + i * COLUMNS, d_scores + i * COLUMNS, row + i, b, ql[i], rests, tile, lines);
      for (size_t n = 0; n < h.terms.size(); ++n)
        for (long j = 0; h.terms[n].is_level() && h.terms[n].record->learned && j < count; ++j)
          h.terms[n].record->d_key_level[index * p.keys + column + j] += tile.of_keys[n][j];
      for (size_t n = 0; n < h.terms.size(); ++n)
        if (h.terms[n].kind == PROFILE && h.terms[n].record->learned) h.terms[n].profiles.finish(tile.mixed[n]);
      product<true>(weights, COLUMNS, d_out + row * p.value, p.value, PANEL, d_v + column * p.value, p.value, count,
                    p.value, rows, true);
      product<true>(d_scores, COLUMNS, scaled.data(), p.dim, PANEL, d_k + column * p.dim, p.dim, count, p.dim, rows, true);
      product<false>(d_scores, COLUMNS, h.k + column * p.dim, p.dim, PANEL, d_q + row * p.dim, p.dim, rows, p.dim, count,
                     true);
    }
    for (long r = row; r < row + rows; ++r) {
      float* to = d_q + r * p.dim;
      // Without a cap content is a product of the query, and so is its part in the gradient of the row's factor.
      if (p.d_logit_scale && h.cap == 0)
        p.d_logit_scale[index * p.queries + r] += float(p.scale) * dot(h.q + r * p.dim, to, p.dim);
      const float by = float(p.scale) * (h.cap > 0 ? 1.0f : h.factor(r));
      for (long d = 0; d < p.dim; ++d) to[d] *= by;
    }
    for (LineTotals& line : lines)
      for (size_t n = 0; n < line.slope.size(); ++n) {
        line.slope[n] += sum(line.sums.slope[n]);
        line.start[n] += sum(line.sums.start[n]);
      }
  }
  for (size_t n = 0; n < lines.size(); ++n)
    for (size_t line = 0; h.terms[n].record->learned && line < lines[n].slope.size(); ++line) {
      const long to = index * (long)lines[n].slope.size() + (long)line;
      h.terms[n].record->d_line_slope[to] = float(lines[n].slope[line]);
      h.terms[n].record->d_line_start[to] = float(lines[n].start[line]);
    }
}

}  // namespace

extern "C" {

void lengthwise_forward(const Problem* p) {
  share(p->threads, p->batch * p->heads, [&](long index) {
    const Head head(*p, index, false);
    Tile tile;
    head.allocate(tile, false);
    for (long row = 0; row < p->queries; row += ROWS) forward_rows(head, row, tile);
  });
}

void lengthwise_backward(const Problem* p) {
  share(p->threads, p->batch * p->heads, [&](long index) { backward_head(Head(*p, index, true)); });
}

}
