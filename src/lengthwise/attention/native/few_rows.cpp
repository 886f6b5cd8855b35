// A few queries against many keys, as in decoding: every key and value is read once, where it lies and in its own
// precision, and meets all queries that share its head. Nothing is packed, and the bias is made as it is added.
//
//   scores[i, j] = scale q[i] . k[j] + bias(i, j)
//   bias         = 0, or table[query[i] - key[j] - first], or -slope[i] |query_level[i] - key_level[j]|, or row[i, j],
//                  or line_slope[n] x + line_start[n] where n knots are at most x = factor[i] table[...]
//
// Where steps are given the levels are their sums, and the queries are the last keys. Steps lie among the keys, so both
// are read together, from the last key to the first: there levels count back from 0 at the last key.
//
// The keys of a head are cut into parts where there are more threads than heads; a part keeps a maximum, a sum and
// an output per row, and the parts are put together at the end.

#include <cmath>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include "vectors.h"

// What Python hands over; few_rows.py has the same fields in the same order. A stride counts elements, and is 0 along
// an axis that is spread; the last axis of every array is contiguous, but for the steps, which lie among the keys.
struct FewRows {
  int64_t batch, heads, group, queries, keys, dim, value, precision, causal, window, start, threads;
  int64_t q_strides[3], k_strides[3], v_strides[3];  // sequence, head, position
  const void *q, *k, *v;
  float* out;  // (sequence, head, query, value)
  double scale;
  int64_t kind;
  const uint8_t* key_mask;
  int64_t key_mask_stride;
  const int64_t* documents;
  int64_t documents_stride;
  const float* table;
  int64_t table_stride, table_length, first;
  const int64_t *query, *key;
  int64_t query_stride, key_stride;
  const float *factor, *knots, *line_slope, *line_start;
  int64_t factor_stride, knot_count;
  const double *query_level, *key_level;
  int64_t query_level_strides[2], key_level_strides[2];
  const float* step;
  int64_t step_strides[3];
  const float* slope;
  int64_t slope_strides[3];
  const float* row;
  int64_t row_strides[3];
};

namespace {

constexpr long BLOCK = 128;

enum Kind { NONE = 0, TABLE = 1, LEVEL = 2, LINE = 3, STEP = 4, ROW = 5 };

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
  bool odd = false;  // a score that is not finite: somebody else must say what that means
  std::vector<float> out;
};

// The table's entries for a row on keys that follow one another.
void look_up(const FewRows& p, long batch, long head, long i, long column, long count, float* to) {
  const float* table = p.table + head * p.table_stride;
  const int64_t* key = p.key + batch * p.key_stride + column;
  const int64_t query = p.query[batch * p.query_stride + i] - p.first, last = p.table_length - 1;
  bool rising = true;
  for (long j = 0; j < count; ++j) rising &= key[j] == key[0] + j;
  const int64_t nearest = query - key[0] - (count - 1);
  if (rising && nearest >= 0 && query - key[0] <= last) {
    const float* from = table + nearest;
    for (long j = 0; j < count; ++j) to[j] = from[count - 1 - j];
  } else {
    for (long j = 0; j < count; ++j) to[j] = table[std::min(std::max<int64_t>(query - key[j], 0), last)];
  }
}

// Add to each score what its line has at x. Nearly always one line holds for all of a block.
void add_lines(const FewRows& p, long head, const float* x, long count, float* scores) {
  const auto line = [&](float at) { return std::upper_bound(p.knots, p.knots + p.knot_count, at) - p.knots; };
  const float *slope = p.line_slope + head * (p.knot_count + 1), *start = p.line_start + head * (p.knot_count + 1);
  const auto ends = std::minmax_element(x, x + count);
  const long low = line(*ends.first), high = line(*ends.second);
  if (low == high) {
    for (long j = 0; j < count; ++j) scores[j] += slope[low] * x[j] + start[low];
  } else {
    for (long j = 0; j < count; ++j) scores[j] += slope[line(x[j])] * x[j] + start[line(x[j])];
  }
}

// A walk from the last key of a head back to its first, step by step.
struct Walk {
  const float* step;
  long stride, at;    // the key that it has come to
  double level = 0;   // and that key's level
  long first = -1;    // the key where the block begins whose levels these are
  double levels[BLOCK];

  Walk(const FewRows& p, long batch, long head)
      : step(p.step + batch * p.step_strides[0] + head * p.step_strides[1]), stride(p.step_strides[2]), at(p.keys - 1) {}
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

// Add the bias to the scores of a row on keys that follow one another.
void add_bias(const FewRows& p, long batch, long head, long i, long column, long count, const double* levels, double own,
              float* scores) {
  if (p.kind == TABLE || p.kind == LINE) {
    float found[BLOCK];
    look_up(p, batch, head, i, column, count, found);
    if (p.kind == TABLE) {
      for (long j = 0; j < count; ++j) scores[j] += found[j];
    } else {
      const float factor = p.factor[batch * p.factor_stride + i];
      for (long j = 0; j < count; ++j) found[j] *= factor;
      add_lines(p, head, found, count, scores);
    }
  } else if (p.kind == LEVEL || p.kind == STEP) {
    const float steep = p.slope[batch * p.slope_strides[0] + head * p.slope_strides[1] + i * p.slope_strides[2]];
    for (long j = 0; j < count; ++j) scores[j] -= steep * float(std::fabs(own - levels[j]));
  } else if (p.kind == ROW) {
    const float* row = p.row + batch * p.row_strides[0] + head * p.row_strides[1] + i * p.row_strides[2] + column;
    for (long j = 0; j < count; ++j) scores[j] += row[j];
  }
}

// Which keys of a block a query may see, packed to the front; how many.
long look(const FewRows& p, long batch, long i, long column, long count, long* seen) {
  const long slot = p.start + i;
  const uint8_t* mask = p.key_mask ? p.key_mask + batch * p.key_mask_stride : nullptr;
  const int64_t* documents = p.documents ? p.documents + batch * p.documents_stride : nullptr;
  long few = 0;
  for (long j = column; j < column + count; ++j) {
    const bool may = (!p.causal || j <= slot) && (!p.window || std::labs(slot - j) < p.window) && (!mask || mask[j]) &&
                     (!documents || documents[slot] == documents[j]);
    seen[few] = j - column;
    few += may;
  }
  return few;
}

template <class T>
void visit(const FewRows& p, long batch, long kv, long from, long to, std::vector<Row>& rows) {
  const T* k = static_cast<const T*>(p.k) + batch * p.k_strides[0] + kv * p.k_strides[1];
  const T* v = static_cast<const T*>(p.v) + batch * p.v_strides[0] + kv * p.v_strides[1];
  const long k_step = p.k_strides[2], v_step = p.v_strides[2];
  std::vector<float> q(rows.size() * p.dim);
  for (long n = 0; n < (long)rows.size(); ++n) {
    const long head = kv * p.group + n / p.queries, i = n % p.queries;
    const T* of = static_cast<const T*>(p.q) + batch * p.q_strides[0] + head * p.q_strides[1] + i * p.q_strides[2];
    for (long d = 0; d < p.dim; ++d) q[n * p.dim + d] = number(of[d]) * float(p.scale);
    rows[n].out.assign(p.value, 0.0f);
  }
  std::vector<double> own(rows.size());
  std::vector<Walk> walks;
  for (long n = 0; n < (long)rows.size() && (p.kind == LEVEL || p.kind == STEP); ++n) {
    const long head = kv * p.group + n / p.queries, i = n % p.queries;
    if (p.kind == LEVEL) {
      own[n] = p.query_level[batch * p.query_level_strides[0] + head * p.query_level_strides[1] + i];
    } else {
      Walk walk(p, batch, head);
      if (i == 0) walks.push_back(walk);
      walk.to(p.keys - p.queries + i);
      own[n] = walk.level;
    }
  }
  alignas(32) float scores[BLOCK];
  long seen[BLOCK];
  for (long column = from + (to - from - 1) / BLOCK * BLOCK; column >= from; column -= BLOCK) {
    const long count = std::min(BLOCK, to - column);
    const T *keys = k + column * k_step, *values = v + column * v_step;
    for (long n = 0; n < (long)rows.size(); ++n) {
      Row& row = rows[n];
      const long head = kv * p.group + n / p.queries, i = n % p.queries;
      const long few = look(p, batch, i, column, count, seen);
      if (few == 0) continue;
      for (long j = 0; j < count; j += 8) dots(&q[n * p.dim], keys + j * k_step, k_step, p.dim, count - j, scores + j);
      const double* levels = nullptr;
      if (p.kind == LEVEL)
        levels = p.key_level + batch * p.key_level_strides[0] + head * p.key_level_strides[1] + column;
      else if (p.kind == STEP)  // after the keys beside which they lie were read in order
        levels = walks[n / p.queries].through(column, count);
      add_bias(p, batch, head, i, column, count, levels, own[n], scores);
      float check = 0, peak = row.most;
      for (long j = 0; j < few; ++j) {
        scores[j] = scores[seen[j]];
        check += scores[j] * 0.0f;
        peak = std::max(peak, scores[j]);
      }
      row.odd |= check != 0;  // infinity times 0 is NaN, which differs from everything
      std::fill(scores + few, scores + BLOCK, -INF);
      const float shift = peak == -INF ? 0 : peak;
      v8 added = all(0);
      for (long j = 0; j < few; j += 8) {
        const v8 x = exponential(load(scores + j) - shift);
        store(scores + j, x);
        added += x;
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

// One row from its parts; whether everything in it is finite.
bool join(const std::vector<const Row*>& parts, long value, float* out) {
  float most = -INF, total = 0;
  bool good = true;
  for (const Row* part : parts) {
    most = std::max(most, part->most);
    good = good && !part->odd;
  }
  std::fill(out, out + value, 0.0f);
  for (const Row* part : parts) {
    if (part->most == -INF && part->total == 0) continue;
    const float share = std::exp(part->most - most);
    total += part->total * share;
    for (long d = 0; d < value; ++d) out[d] += part->out[d] * share;
  }
  float check = 0;
  for (long d = 0; d < value && total != 0; ++d) check += (out[d] /= total) * 0.0f;
  return good && check == 0;
}

}  // namespace

extern "C" {

// 1 if every number that a row may see was finite; else the output says nothing.
int lengthwise_few_rows(const FewRows* p) {
  const long heads = p->heads / p->group, pieces = p->batch * heads, rows = p->group * p->queries;
  const long blocks = (p->keys + BLOCK - 1) / BLOCK;
  const long parts = std::max<long>(1, std::min<long>(blocks, pieces % p->threads == 0 ? 1 : 2 * p->threads));
  const long size = (blocks + parts - 1) / parts * BLOCK;
  std::vector<std::vector<Row>> found(pieces * parts, std::vector<Row>(rows));
  share(p->threads, pieces * parts, [&](long n) {
    const long piece = n / parts, from = n % parts * size, to = std::min<long>(from + size, p->keys);
    if (from >= to) return;
    const auto run = p->precision == 0 ? visit<float> : p->precision == 1 ? visit<BFloat16> :
#ifdef __F16C__
                                                                          visit<Half>;
#else
                                                                          nullptr;
#endif
    run(*p, piece / heads, piece % heads, from, to, found[n]);
  });
  bool good = true;
  for (long piece = 0; piece < pieces; ++piece)
    for (long n = 0; n < rows; ++n) {
      std::vector<const Row*> of_row;
      for (long part = 0; part < parts; ++part)
        if (!found[piece * parts + part][n].out.empty()) of_row.push_back(&found[piece * parts + part][n]);
      const long head = piece % heads * p->group + n / p->queries, i = n % p->queries;
      float* out = p->out + ((piece / heads * p->heads + head) * p->queries + i) * p->value;
      good = join(of_row, p->value, out) && good;
    }
  return good;
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
