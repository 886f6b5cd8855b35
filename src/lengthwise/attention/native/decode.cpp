// A few queries against many keys, as in decoding: every key and value is read once, where it lies and in its own
// precision, and meets all queries that share its head. Nothing is packed, and the bias is made as it is added.
//
//   content[i, j] = scale q[i] . k[j], or softcap tanh(scale q[i] . k[j] / softcap)
//   scores[i, j]  = logit_scale[i] (content[i, j] + the sum of the terms of the bias)
//
// Keys are read from the last to the first. Where levels are sums of steps, which lie among the keys, both are read
// together: there levels count back from 0 at the last key.
//
// The keys of a head are cut into parts where there are more threads than heads; a part keeps a maximum, a sum and
// an output per row, and the parts are put together at the end, with the sink.

#include <cmath>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include "softcap.h"
#include "vectors.h"

// What Python hands over, number by number; decode.py packs the same in the same order: the call, then the terms of its
// bias, then its bands.

// Strides count elements and are 0 along an axis that is spread. Axes beyond them are contiguous.
template <class T, int AXES>
struct Array {
  const T* data;
  int64_t strides[AXES];

  explicit operator bool() const { return data; }
  const T* at(long first) const { return data + first * strides[0]; }
  const T* at(long first, long second) const { return at(first) + second * strides[1]; }
  const T* at(long first, long second, long third) const { return at(first, second) + third * strides[2]; }
};

// entries[head, query - key - first], the nearest entry beyond the ends
struct Table {
  Array<float, 1> entries;
  int64_t length, first;
  Array<int64_t, 2> query;
  Array<int64_t, 1> key;
};

// slope[head, n] x + intercept[head, n] where n knots are at most x = factor[i] curve[...]
struct Lines {
  Table curve;
  Array<float, 2> factor;
  const float* knots;
  int64_t knot_count;
  Array<float, 1> slope, intercept;
};

// -slope[i] curve(|query[i] - key[j]|); with steps there are no levels, and the queries are the slots from `start` on
struct Levels {
  int64_t curve, start;
  Array<float, 3> slope, step;
  Array<double, 3> query;
  Array<double, 2> key;
};

// rows[i] . profiles[:, query - key - first], or with the rows of the keys; beyond the ends the nearest, or nothing
struct Profiles {
  Array<float, 3> rows;
  Array<float, 2> profiles;  // head, profile
  int64_t count, length, first, of_keys, is_zero;
  Array<int64_t, 2> query;
  Array<int64_t, 1> key;
};

// value[i, j]
struct Dense {
  Array<float, 3> value;
};

enum Kind { TABLE = 0, LINES = 1, LEVELS = 2, DENSE = 3, PROFILES = 4 };
enum Curve { LINEAR = 0, LOG1P_SQUARE = 1 };

struct Term {
  int64_t kind;
  union {
    Table table;
    Lines lines;
    Levels levels;
    Dense dense;
    Profiles profiles;
  };
};

// Keys from `nearest` to `farthest` chunks away, the last excluded, and below number `first` of their document.
struct Band {
  int64_t nearest, farthest, first, chunk;
};

struct Decode {
  int64_t batch, heads, group, queries, keys, dim, value, precision, causal, window, start, threads;
  int64_t term_count, band_count;
  double scale, softcap;   // no cap is 0
  Array<void, 3> q, k, v;  // sequence, head, position
  float *out, *lse;        // (sequence, head, query, value); the second may be missing
  Array<float, 3> logit_scale, sink;
  Array<uint8_t, 1> key_mask;
  Array<int64_t, 2> query_documents;
  Array<int64_t, 1> key_documents;
  Array<int64_t, 2> query_index;
  Array<int64_t, 1> key_index;

  const Term* terms() const { return reinterpret_cast<const Term*>(this + 1); }
  const Band* bands() const { return reinterpret_cast<const Band*>(terms() + term_count); }
};

namespace {

constexpr long BLOCK = 128, AT_ONCE = 4;

typedef uint16_t u16x8 __attribute__((vector_size(16), aligned(2)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
struct BFloat16 { uint16_t bits; };
#ifdef __F16C__  // by its instructions: _Float16 is not a type of clang before 15
struct Half { uint16_t bits; };
inline v8 load(const Half* p) { return (v8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline float number(Half x) { return _cvtsh_ss(x.bits); }
#endif
inline v8 load(const BFloat16* p) {
  return (v8)(__builtin_convertvector(*reinterpret_cast<const u16x8*>(p), u32x8) << 16);
}
inline float number(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline float number(float x) { return x; }

// The sums of eight vectors as one.
inline v8 sums_of(const v8* x) {
  v8 two[4], four[2];
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n)
    two[n] = SHUFFLE(x[2 * n], x[2 * n + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
             SHUFFLE(x[2 * n], x[2 * n + 1], 1, 9, 3, 11, 5, 13, 7, 15);
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n)
    four[n] = SHUFFLE(two[2 * n], two[2 * n + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
              SHUFFLE(two[2 * n], two[2 * n + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return SHUFFLE(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         SHUFFLE(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// q . k for eight keys that lie `step` apart, the first `count` of them; the others are not read.
template <class T>
inline void dots(const float* q, const T* k, long step, long dim, long count, float* to) {
  const T* at[8];
  for (long n = 0; n < 8; ++n) at[n] = k + std::min(n, count - 1) * step;
  v8 sums[8];
  for (int n = 0; n < 8; ++n) sums[n] = all(0);
  long d = 0;
  for (; d + 8 <= dim; d += 8) {
    const v8 x = load(q + d);
#pragma GCC unroll 8
    for (int n = 0; n < 8; ++n) sums[n] += x * load(at[n] + d);
  }
  store(to, sums_of(sums));
  for (; d < dim; ++d)
    for (int n = 0; n < 8; ++n) to[n] += q[d] * number(at[n][d]);
}

// out[0 .. CHANNELS] += the sum of weight v over the keys named, added up by itself first: sums of sums round less.
template <int VECTORS, class T>
inline void mix(const float* weights, const long* keys, long count, const T* v, long step, float* out) {
  v8 sums[VECTORS];
  for (int n = 0; n < VECTORS; ++n) sums[n] = all(0);
  for (long j = 0; j < count; ++j) {
    const v8 weight = all(weights[j]);
    const T* from = v + keys[j] * step;
#pragma GCC unroll 8
    for (int n = 0; n < VECTORS; ++n) sums[n] += weight * load(from + 8 * n);
  }
  for (int n = 0; n < VECTORS; ++n) store(out + 8 * n, load(out + 8 * n) + sums[n]);
}

// What a part of the keys amounts to for one row.
struct Row {
  float most = -INF, total = 0;
  bool finite = true;  // whether all scores are
  std::vector<float> out;
};

// Whether keys follow one another.
bool are_rising(const int64_t* key, long count) {
  bool rising = true;
  for (long j = 0; j < count; ++j) rising &= key[j] == key[0] + j;
  return rising;
}

// The table's entries for a row on keys that follow one another.
void look_up(const Table& t, long batch, long head, long i, long column, long count, float* to) {
  const float* entries = t.entries.at(head);
  const int64_t* key = t.key.at(batch) + column;
  const int64_t query = *t.query.at(batch, i) - t.first, last = t.length - 1;
  const int64_t nearest = query - key[0] - (count - 1);
  if (are_rising(key, count) && nearest >= 0 && query - key[0] <= last) {
    const float* from = entries + nearest;
    for (long j = 0; j < count; ++j) to[j] = from[count - 1 - j];
  } else {
    for (long j = 0; j < count; ++j) to[j] = entries[std::min(std::max<int64_t>(query - key[j], 0), last)];
  }
}

// Add to each score what its query, or its key, mixes of the profiles at their distance.
void add_mixed(const Profiles& p, long batch, long head, long i, long column, long count, float* scores) {
  const float* profiles = p.profiles.at(head);
  const int64_t* key = p.key.at(batch) + column;
  const int64_t query = *p.query.at(batch, i) - p.first, last = p.length - 1, step = p.profiles.strides[1];
  const int64_t nearest = query - key[0] - (count - 1);
  if (!p.of_keys && nearest >= 0 && query - key[0] <= last && are_rising(key, count)) {
    const float* own = p.rows.at(batch, head, i);
    alignas(32) float mixed[BLOCK] = {};
    for (long n = 0; n < p.count; ++n) {
      const float* from = profiles + n * step + nearest;
      for (long j = 0; j < count; ++j) mixed[j] += own[n] * from[j];
    }
    for (long j = 0; j < count; ++j) scores[j] += mixed[count - 1 - j];
    return;
  }
  int64_t at = -1;
  float value = 0;
  for (long j = 0; j < count; ++j) {
    const int64_t place = query - key[j], inside = std::min(std::max<int64_t>(place, 0), last);
    if (p.is_zero && inside != place) continue;
    if (p.of_keys || inside != at) {
      const float* own = p.rows.at(batch, head, p.of_keys ? column + j : i);
      value = 0;
      for (long n = 0; n < p.count; ++n) value += own[n] * profiles[n * step + inside];
      at = inside;
    }
    scores[j] += value;
  }
}

// Add to each score what its line has at x. Nearly always one line holds for all of a block.
void add_lines(const Lines& p, long head, const float* x, long count, float* scores) {
  const auto line = [&](float at) { return std::upper_bound(p.knots, p.knots + p.knot_count, at) - p.knots; };
  const float *slope = p.slope.at(head), *intercept = p.intercept.at(head);
  const auto ends = std::minmax_element(x, x + count);
  const long low = line(*ends.first), high = line(*ends.second);
  if (low == high) {
    for (long j = 0; j < count; ++j) scores[j] += slope[low] * x[j] + intercept[low];
  } else {
    for (long j = 0; j < count; ++j) {
      const long at = line(x[j]);
      scores[j] += slope[at] * x[j] + intercept[at];
    }
  }
}

// A walk from the last key of a head back to its first, step by step.
struct Walk {
  const float* step;
  long stride, at;   // the key that it has come to
  double level = 0;  // and that key's level
  long first = -1;   // the key where the block begins whose levels these are
  double levels[BLOCK];

  Walk(const Levels& p, long batch, long head, long last)
      : step(p.step.at(batch, head)), stride(p.step.strides[2]), at(last) {}
  void to(long key) {
    for (; at > key; --at) level -= step[at * stride];
  }
  // The levels of a block. Four steps are added up by themselves, so that four keys wait for one sum and not for four.
  const double* through(long column, long count) {
    if (first == column) return levels;
    to(column + count - 1);
    const float* from = step + column * stride;
    long j = count - 1;
    for (; j >= 4; j -= 4) {
      const double one = from[j * stride], two = one + from[(j - 1) * stride];
      const double three = two + from[(j - 2) * stride], four = three + from[(j - 3) * stride];
      levels[j] = level;
      levels[j - 1] = level - one;
      levels[j - 2] = level - two;
      levels[j - 3] = level - three;
      level -= four;
    }
    for (at = column + j; j >= 0; --j) {
      to(column + j);
      levels[j] = level;
    }
    first = column;
    return levels;
  }
};

// One term of the bias for the rows that share a head of the keys.
struct Added {
  const Decode& p;
  const Term& term;
  long batch, kv;
  std::vector<double> own;  // the level of each row
  std::vector<Walk> walks;  // one for each head

  // Keys from `end` on are seen by nobody.
  Added(const Decode& p, const Term& term, long batch, long kv, long end) : p(p), term(term), batch(batch), kv(kv) {
    if (term.kind != LEVELS) return;
    const Levels& of = term.levels;
    for (long n = 0; n < p.group * p.queries; ++n) {
      const long head = kv * p.group + n / p.queries, i = n % p.queries;
      if (of.step) {
        Walk walk(of, batch, head, std::max<long>(end, of.start + p.queries) - 1);
        if (i == 0) walks.push_back(walk);
        walk.to(of.start + i);
        own.push_back(walk.level);
      } else {
        own.push_back(*of.query.at(batch, head, i));
      }
    }
  }

  // To the scores of a row on keys that follow one another.
  void to(float* scores, long n, long column, long count) {
    const long head = kv * p.group + n / p.queries, i = n % p.queries;
    if (term.kind == TABLE) {
      float found[BLOCK];
      look_up(term.table, batch, head, i, column, count, found);
      for (long j = 0; j < count; ++j) scores[j] += found[j];
    } else if (term.kind == PROFILES) {
      add_mixed(term.profiles, batch, head, i, column, count, scores);
    } else if (term.kind == LINES) {
      const Lines& of = term.lines;
      float x[BLOCK];
      look_up(of.curve, batch, head, i, column, count, x);
      const float factor = *of.factor.at(batch, i);
      for (long j = 0; j < count; ++j) x[j] *= factor;
      add_lines(of, head, x, count, scores);
    } else if (term.kind == LEVELS) {
      const Levels& of = term.levels;
      // Steps are read after the keys beside which they lie were read in order.
      const double* levels =
          of.step ? walks[n / p.queries].through(column, count) : of.key.at(batch, head) + column;
      const float slope = *of.slope.at(batch, head, i);
      const double level = own[n];
      if (of.curve == LINEAR) {
        for (long j = 0; j < count; ++j) scores[j] -= slope * float(std::fabs(level - levels[j]));
      } else {
        alignas(32) float x[BLOCK] = {};
        for (long j = 0; j < count; ++j) x[j] = float(level - levels[j]);
        for (long j = 0; j < count; j += 8 * AT_ONCE) {
          v8 log[AT_ONCE];
#pragma GCC unroll 4
          for (int n = 0; n < AT_ONCE; ++n) log[n] = load(x + j + 8 * n) * load(x + j + 8 * n);
          logs_of_1p(log);
#pragma GCC unroll 4
          for (int n = 0; n < AT_ONCE; ++n) store(x + j + 8 * n, slope * log[n]);
        }
        for (long j = 0; j < count; ++j) scores[j] -= x[j];
      }
    } else {
      const float* row = term.dense.value.at(batch, head, i) + column;
      for (long j = 0; j < count; ++j) scores[j] += row[j];
    }
  }
};

inline int64_t floor_quotient(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// Which keys of a block a query sees, packed to the front; how many.
long look(const Decode& p, long batch, long i, long column, long count, long* seen) {
  const long slot = p.start + i;
  long first = column, end = column + count;
  if (p.causal) end = std::min(end, slot + 1);
  if (p.window) {
    first = std::max<long>(first, slot - p.window + 1);
    end = std::min<long>(end, slot + p.window);
  }
  if (!p.key_mask && !p.key_documents && !p.band_count) {
    for (long j = first; j < end; ++j) seen[j - first] = j - column;
    return std::max(end - first, 0L);
  }
  const uint8_t* mask = p.key_mask ? p.key_mask.at(batch) : nullptr;
  const int64_t* documents = p.key_documents ? p.key_documents.at(batch) : nullptr;
  const int64_t own = documents ? *p.query_documents.at(batch, i) : 0;
  bool in_band[BLOCK];
  for (long band = 0; band < p.band_count; ++band) {
    const Band& of = p.bands()[band];
    const int64_t* number = p.key_index.at(batch) + column;
    const int64_t chunk = floor_quotient(*p.query_index.at(batch, i), of.chunk);
    const int64_t low = (chunk - of.farthest + 1) * of.chunk;
    const int64_t high = std::min((chunk - of.nearest + 1) * of.chunk, of.first);
    for (long j = 0; j < count; ++j) in_band[j] = (band && in_band[j]) || (number[j] >= low && number[j] < high);
  }
  long few = 0;
  for (long j = first; j < end; ++j) {
    const bool visible =
        (!mask || mask[j]) && (!documents || documents[j] == own) && (!p.band_count || in_band[j - column]);
    seen[few] = j - column;
    few += visible;
  }
  return few;
}

template <class T>
const T* start_of(const Array<void, 3>& x, long batch, long head) {
  return static_cast<const T*>(x.data) + batch * x.strides[0] + head * x.strides[1];
}

// 0, or NaN if a score of a whole block is not finite: infinity times 0 is NaN, which equals nothing.
float zero_if_finite(const float* scores) {
  v8 zero = all(0);
  for (long j = 0; j < BLOCK; j += 8) zero += load(scores + j) * 0.0f;
  return sum(zero);
}

template <class T>
void visit(const Decode& p, long batch, long kv, long from, long to, long end, std::vector<Row>& rows) {
  const T *k = start_of<T>(p.k, batch, kv), *v = start_of<T>(p.v, batch, kv);
  const long k_step = p.k.strides[2], v_step = p.v.strides[2];
  std::vector<float> q(rows.size() * p.dim), factors(rows.size(), 1.0f);
  for (long n = 0; n < (long)rows.size(); ++n) {
    const long head = kv * p.group + n / p.queries, i = n % p.queries;
    const T* of = start_of<T>(p.q, batch, head) + i * p.q.strides[2];
    for (long d = 0; d < p.dim; ++d) q[n * p.dim + d] = number(of[d]) * float(p.scale);
    rows[n].out.assign(p.value, 0.0f);
    if (p.logit_scale) factors[n] = *p.logit_scale.at(batch, head, i);
  }
  std::vector<Added> bias;
  for (long term = 0; term < p.term_count; ++term) bias.emplace_back(p, p.terms()[term], batch, kv, end);
  const Softcap softcap{float(p.softcap)};
  alignas(32) float scores[BLOCK] = {};
  long seen[BLOCK];
  for (long column = from + (to - from - 1) / BLOCK * BLOCK; column >= from; column -= BLOCK) {
    const long count = std::min(BLOCK, to - column);
    const T *keys = k + column * k_step, *values = v + column * v_step;
    for (long n = 0; n < (long)rows.size(); ++n) {
      Row& row = rows[n];
      const long few = look(p, batch, n % p.queries, column, count, seen);
      if (few == 0) continue;
      for (long j = 0; j < count; j += 8) dots(&q[n * p.dim], keys + j * k_step, k_step, p.dim, count - j, scores + j);
      const bool whole = few == BLOCK;  // then nothing moves, and eight keys are looked at together
      float check = 0, peak = row.most;
      if (p.softcap != 0) {  // which would make an infinity finite
        check = whole ? zero_if_finite(scores) : 0;
        for (long j = 0; j < few && !whole; ++j) check += scores[seen[j]] * 0.0f;
        softcap.apply(scores, (count + 7) / 8 * 8, INF, [&](const auto& content) {
          for (long j = 0; j < count; j += 8) store(scores + j, content(load(scores + j)));
        });
      }
      for (Added& term : bias) term.to(scores, n, column, count);
      if (p.logit_scale)
        for (long j = 0; j < count; ++j) scores[j] *= factors[n];
      if (whole) {
        v8 top = all(peak);
        for (long j = 0; j < BLOCK; j += 8) top = pick(load(scores + j) > top, load(scores + j), top);
        peak = largest(top);
        check += zero_if_finite(scores);
      } else {
        for (long j = 0; j < few; ++j) {
          scores[j] = scores[seen[j]];
          check += scores[j] * 0.0f;
          peak = std::max(peak, scores[j]);
        }
        std::fill(scores + few, scores + BLOCK, -INF);
      }
      row.finite &= check == 0;
      const float shift = peak == -INF ? 0 : peak;
      v8 added = all(0);
      for (long j = 0; j < few; j += 8 * AT_ONCE) {
        v8 x[AT_ONCE];
#pragma GCC unroll 4
        for (int n = 0; n < AT_ONCE; ++n) x[n] = load(scores + j + 8 * n) - shift;
        exponentials(x);
#pragma GCC unroll 4
        for (int n = 0; n < AT_ONCE; ++n) {
          store(scores + j + 8 * n, x[n]);
          added += x[n];
        }
      }
      if (peak > row.most && row.most != -INF) {
        const float fade = std::exp(row.most - peak);
        row.total *= fade;
        for (float& x : row.out) x *= fade;
      }
      row.most = peak;
      row.total += sum(added);
      long d = 0;
      for (; d + 64 <= p.value; d += 64) mix<8>(scores, seen, few, values + d, v_step, &row.out[d]);
      for (; d + 8 <= p.value; d += 8) mix<1>(scores, seen, few, values + d, v_step, &row.out[d]);
      for (; d < p.value; ++d)
        for (long j = 0; j < few; ++j) row.out[d] += scores[j] * number(values[seen[j] * v_step + d]);
    }
  }
}

// One row from its parts and its sink, -infinity for none; whether all scores and outputs in it are finite.
bool join(const std::vector<const Row*>& parts, float sink, long value, float* out, float* lse) {
  float most = std::max(-INF, sink), total = 0;
  bool finite = true;
  for (const Row* part : parts) {
    most = std::max(most, part->most);
    finite = finite && part->finite;
  }
  std::fill(out, out + value, 0.0f);
  for (const Row* part : parts) {
    if (part->most == -INF && part->total == 0) continue;
    const float share = std::exp(part->most - most);
    total += part->total * share;
    for (long d = 0; d < value; ++d) out[d] += part->out[d] * share;
  }
  if (sink != -INF) total += std::exp(sink - most);
  float check = 0;
  for (long d = 0; d < value && total != 0; ++d) check += (out[d] /= total) * 0.0f;
  if (lse) *lse = total == 0 ? -INF : most == INF ? INF : float(most + std::log(double(total)));
  return finite && check == 0;
}

}  // namespace

extern "C" {

// 1 if every score and every output is finite; else a key or a value that a row sees may not be.
int lengthwise_decode(const Decode* p) {
  const long heads = p->heads / p->group, pieces = p->batch * heads, rows = p->group * p->queries;
  // Keys that order alone hides from every query are never visited.
  const long end = p->causal ? std::clamp<long>(p->start + p->queries, 0, p->keys) : p->keys;
  const long begin = p->window ? std::clamp<long>(p->start - p->window + 1, 0, end) : 0;
  const long blocks = (end - begin + BLOCK - 1) / BLOCK;
  const long parts = std::max<long>(1, std::min<long>(blocks, pieces % p->threads == 0 ? 1 : 2 * p->threads));
  const long size = (blocks + parts - 1) / parts * BLOCK;
  if (pieces * rows == 0) return 1;
  std::vector<std::vector<Row>> found(pieces * parts, std::vector<Row>(rows));
  share(p->threads, pieces * parts, [&](long n) {
    const long piece = n / parts, from = begin + n % parts * size, to = std::min<long>(from + size, end);
    if (from >= to) return;
    const auto run = p->precision == 0 ? visit<float> : p->precision == 1 ? visit<BFloat16> :
#ifdef __F16C__
                                                                          visit<Half>;
#else
                                                                          nullptr;
#endif
    run(*p, piece / heads, piece % heads, from, to, end, found[n]);
  });
  bool finite = true;
  for (long piece = 0; piece < pieces; ++piece)
    for (long n = 0; n < rows; ++n) {
      std::vector<const Row*> of_row;
      for (long part = 0; part < parts; ++part) of_row.push_back(&found[piece * parts + part][n]);
      const long batch = piece / heads, head = piece % heads * p->group + n / p->queries, i = n % p->queries;
      const long row = (batch * p->heads + head) * p->queries + i;
      const float sink = p->sink ? *p->sink.at(batch, head, i) : -INF;
      finite = join(of_row, sink, p->value, p->out + row * p->value, p->lse ? p->lse + row : nullptr) && finite;
    }
  return finite;
}

// Whether float16 is among the precisions that were compiled.
int lengthwise_takes_half() {
#ifdef __F16C__
  return 1;
#else
  return 0;
#endif
}

}
