// A term of the bias that every query, or every key, mixes of profiles by distance, for one head of one sequence:
//
//   bias[i, j] = rows[i] . profiles[:, j - i], or rows[j] . profiles[:, j - i]
//
// The rows of one side and a block of keys have ROWS + COLUMNS - 1 distances between them: a window of the profiles. Its
// product with a few rows at a time is the bias with every row shifted by one against the row above, and nothing is
// moved to undo that: written or read with a step of one more than a row is long, diagonals are columns. For that the
// gradient of the bias lies among zeros, as many on every side as rows are taken at a time.

#pragma once

#include "vectors.h"

namespace {

template <long ROWS, long COLUMNS>
struct Mixture {
  static constexpr long EDGE = MOST, STEP = COLUMNS + 2 * PANEL, SPAN = ROWS + COLUMNS + PANEL;

  // What belongs to one tile.
  struct Tile {
    std::vector<float> across, down_room, d_down_room, bias_room, d_bias_room;
    const float* down = nullptr;  // the window by distance; across is the same by profile
    float *d_down = nullptr, *bias = nullptr, *d_bias = nullptr;  // bias is (ROWS, COLUMNS), rows STEP apart
    bool is_inside = false;       // the window lies within the profiles, which then are read and added to in place
    long row = 0, rows = 0, column = 0, keys = 0, shift = 0;
    bool is_far = false;  // all distances are beyond the same end of the profiles
    long end = 0;

    void allocate(long count, bool backward) {
      across.assign(count * SPAN, 0.0f);
      bias_room.assign((ROWS + 1) * STEP, 0.0f);
      bias = bias_room.data() + EDGE;
      if (!backward) return;
      down_room.assign(SPAN * count, 0.0f);
      d_down_room.assign(SPAN * count, 0.0f);
      d_bias_room.assign((ROWS + 2 * EDGE + 1) * STEP, 0.0f);
      d_bias = d_bias_room.data() + EDGE * STEP + EDGE;
    }
  };

  const float *rows = nullptr, *by_profile = nullptr, *by_distance = nullptr;  // distances fall along the profiles
  float *d_rows = nullptr, *d_profiles = nullptr;
  long count = 0, length = 0, origin = 0;  // origin: the column of the profiles for the first query on the first key
  bool of_keys = false, is_zero = false;   // is_zero: there is no bias beyond the ends
  std::vector<float> panels;               // rows of keys, sixteen of them side by side

  long column_of(long i, long j) const { return origin + j - i; }
  bool is_inside(long u) const { return u >= 0 && u < length; }
  long clamped(long u) const { return std::min(std::max(u, 0L), length - 1); }
  const float* profile(long i, long j) const { return by_distance + clamped(column_of(i, j)) * count; }

  void begin(Tile& tile, long row, long rows_here, long column, long keys_here, bool backward) const {
    if (backward && rows_here < tile.rows)  // of the block before
      std::fill(tile.d_bias_room.begin(), tile.d_bias_room.end(), 0.0f);
    tile.row = row, tile.rows = rows_here, tile.column = column, tile.keys = keys_here;
    tile.shift = column_of(row + ROWS - 1, column);
    tile.is_far = tile.shift + ROWS + COLUMNS - 2 <= 0 || tile.shift >= length - 1;
    tile.end = clamped(tile.shift);
    if (tile.is_far) {
      if (is_zero && (tile.shift + ROWS + COLUMNS - 2 < 0 || tile.shift >= length)) tile.end = -1;
      else if (is_zero) tile.is_far = false;  // it touches the end
    }
    if (tile.is_far) {
      fill_far(tile);
      return;
    }
    cut(tile, backward);
    if (of_keys) mix_keys(tile);
    else mix_queries(tile);
  }

  // The window: from `shift` on, one distance less with every step.
  void cut(Tile& tile, bool backward) const {
    const long from = std::max(tile.shift, 0L), before = std::min(from - tile.shift, SPAN);
    const long inside = std::max(std::min(tile.shift + SPAN, length) - from, 0L);
    for (long n = 0; n < count; ++n) {
      const float* profile = by_profile + n * length;
      float* to = tile.across.data() + n * SPAN;
      std::fill(to, to + before, is_zero ? 0.0f : profile[0]);
      std::memcpy(to + before, profile + from, inside * sizeof(float));
      std::fill(to + before + inside, to + SPAN, is_zero ? 0.0f : profile[length - 1]);
    }
    if (!backward) return;
    tile.is_inside = inside == SPAN;
    tile.down = tile.is_inside ? by_distance + from * count : tile.down_room.data();
    tile.d_down = tile.is_inside ? d_profiles + from * count : tile.d_down_room.data();
    for (long x = 0; !tile.is_inside && x < SPAN; ++x) {
      const long u = tile.shift + x;
      float* to = tile.down_room.data() + x * count;
      if (is_zero && !is_inside(u)) std::fill_n(to, count, 0.0f);
      else std::memcpy(to, by_distance + clamped(u) * count, count * sizeof(float));
    }
  }

  void mix_queries(Tile& tile) const {
    in_blocks(tile.rows, [&](auto m, long first) {
      constexpr long M = m.value;
      const float* window = tile.across.data() + ROWS - (first + M);
      for (long n = 0; n < COLUMNS + M - 1; n += PANEL)
        panel<M>(rows + (tile.row + first) * count, count, 1, window + n, SPAN, tile.bias + first * STEP + n - (M - 1),
                 STEP + 1, count, false);
    });
  }

  // Here lanes are keys, and every row reads the window from another place on.
  void mix_keys(Tile& tile) const {
    in_blocks(tile.rows, [&](auto m, long first) {
      constexpr int M = m.value;
      for (long j = 0; j < COLUMNS; j += PANEL) {
        const float *own = panels.data() + (tile.column + j) * count, *at = tile.across.data() + ROWS - 1 - first + j;
        v8 left[M], right[M];
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) left[i] = right[i] = all(0);
        for (long n = 0; n < count; ++n, own += PANEL, at += SPAN) {
          const v8 a = load(own), b = load(own + 8);
#pragma GCC unroll 8
          for (int i = 0; i < M; ++i) {
            left[i] += a * load(at - i);
            right[i] += b * load(at - i + 8);
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          store(tile.bias + (first + i) * STEP + j, left[i]);
          store(tile.bias + (first + i) * STEP + j + 8, right[i]);
        }
      }
    });
  }

  float dot(const float* a, const float* b) const {
    v8 total = all(0);
    for (long n = 0; n < count; n += 8) total += load(a + n) * load(b + n);
    return sum(total);
  }

  void add(float* to, float by, const float* from) const {
    for (long n = 0; n < count; n += 8) store(to + n, load(to + n) + by * load(from + n));
  }

  void fill_far(Tile& tile) const {
    const float* profile = by_distance + tile.end * count;
    alignas(32) float of_key[COLUMNS] = {};
    for (long j = 0; of_keys && tile.end >= 0 && j < tile.keys; ++j)
      of_key[j] = dot(rows + (tile.column + j) * count, profile);
    for (long i = 0; i < tile.rows; ++i) {
      float* to = tile.bias + i * STEP;
      if (of_keys) std::memcpy(to, of_key, sizeof of_key);
      else std::fill(to, to + COLUMNS, tile.end < 0 ? 0.0f : dot(rows + (tile.row + i) * count, profile));
    }
  }

  // The gradients of rows and profiles, once that of the whole tile's bias is there.
  void finish(Tile& tile) const {
    if (tile.is_far) {
      if (tile.end >= 0) finish_far(tile);
      return;
    }
    if (of_keys) unmix_keys(tile);
    else unmix_queries(tile);
    for (long x = 0; !tile.is_inside && x < ROWS + COLUMNS - 1; ++x) {
      const long u = tile.shift + x;
      if (!is_zero || is_inside(u)) add(d_profiles + clamped(u) * count, 1, tile.d_down + x * count);
    }
  }

  void unmix_queries(Tile& tile) const {
    const float *d = tile.d_bias, *own = rows + tile.row * count;
    for (long n = 0; n < count; n += PANEL) {
      in_blocks(tile.rows, [&](auto m, long first) {
        constexpr long M = m.value;
        panel<M>(d + first * STEP - (M - 1), STEP + 1, 1, tile.down + (ROWS - (first + M)) * count + n, count,
                 d_rows + (tile.row + first) * count + n, count, COLUMNS + M - 1, true);
      });
      in_blocks(ROWS + COLUMNS - 1, [&](auto m, long x) {
        constexpr long M = m.value;
        const long low = std::max(ROWS - (x + M), 0L), high = std::min(tile.rows, ROWS + COLUMNS - 1 - x);
        panel<M>(d + low * STEP + x + low - (ROWS - 1), 1, STEP + 1, own + low * count + n, count,
                 tile.d_down + x * count + n, count, high - low, tile.is_inside);
      });
    }
  }

  void unmix_keys(Tile& tile) const {
    const float *d = tile.d_bias, *own = rows + tile.column * count;
    for (long n = 0; n < count; n += PANEL) {
      in_blocks(tile.keys, [&](auto m, long j) {
        constexpr long M = m.value;
        panel<M>(d + (tile.rows - 1) * STEP + j, STEP + 1, -STEP, tile.down + (j + ROWS - tile.rows) * count + n,
                 count, d_rows + (tile.column + j) * count + n, count, tile.rows + M - 1, true);
      });
      in_blocks(ROWS + COLUMNS - 1, [&](auto m, long x) {
        constexpr long M = m.value;
        const long low = std::max(x - (ROWS - 1), 0L), high = std::min(tile.keys, x + M - 1 - (ROWS - 1) + tile.rows);
        panel<M>(d + (low - x + ROWS - 1) * STEP + low, -STEP, STEP + 1, own + low * count + n, count,
                 tile.d_down + x * count + n, count, high - low, tile.is_inside);
      });
    }
  }

  void finish_far(Tile& tile) const {
    const float* profile = by_distance + tile.end * count;
    float* d_profile = d_profiles + tile.end * count;
    alignas(32) float of_key[COLUMNS] = {};
    for (long i = 0; i < tile.rows; ++i) {
      const float* d = tile.d_bias + i * STEP;
      v8 total = all(0);
      for (long j = 0; j < COLUMNS; j += 8) {
        if (of_keys) store(of_key + j, load(of_key + j) + load(d + j));
        else total += load(d + j);
      }
      if (of_keys) continue;
      add(d_rows + (tile.row + i) * count, sum(total), profile);
      add(d_profile, sum(total), rows + (tile.row + i) * count);
    }
    for (long j = 0; of_keys && j < tile.keys; ++j) {
      add(d_rows + (tile.column + j) * count, of_key[j], profile);
      add(d_profile, of_key[j], rows + (tile.column + j) * count);
    }
  }
};

}  // namespace
