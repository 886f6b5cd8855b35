// Vectors of eight floats, and what all kernels do with them.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4)));
typedef int32_t i8 __attribute__((vector_size(32)));

// Lanes of a and b, b's counted from 8 on. GCC before 12 has no __builtin_shufflevector, clang no __builtin_shuffle.
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i8{__VA_ARGS__})
#endif

inline v8 load(const float* p) { return *reinterpret_cast<const v8u*>(p); }
inline void store(float* p, v8 x) { *reinterpret_cast<v8u*>(p) = x; }
inline v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }
inline v8 pick(i8 condition, v8 yes, v8 no) { return condition ? yes : no; }
inline v8 absolute(v8 x) { return (v8)((i8)x & 0x7fffffff); }

typedef double v4d __attribute__((vector_size(32), aligned(8)));
typedef float v4 __attribute__((vector_size(16), aligned(4)));

// log(1 + x), x >= 0, to about one unit in the last place; infinite for infinity, NaN for NaN. 1 + x = 2^n (1 + f), where f
// is made of x and not of the rounded sum, and log(1 + f) = f + f^2 P(f); P is a minimax fit of our own. Several at once.
template <int N>
inline void logs_of_1p(v8 (&x)[N]) {
  const float steps[] = {-1.43075190e-1f, 1.49179747e-1f,  -1.65705086e-1f, 1.99620721e-1f,
                         -2.50017552e-1f, 3.33339502e-1f, -4.99999916e-1f};
  v8 whole[N], f[N], p[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const v8 kept = pick(x[n] < 1e37f, x[n], all(1e37f));
    const i8 power = ((i8)(kept + 1.0f) - 0x3f3504f3) >> 23;  // the bits of sqrt(1/2): 1 + f is from there to sqrt(2)
    const v8 shrink = (v8)(0x3f800000 - (power << 23));
    f[n] = kept * shrink + (shrink - 1.0f);
    // What was too large comes back here: infinity, NaN, and beyond 1e37 a little more.
    whole[n] = __builtin_convertvector(power, v8) * 0.693147181f + (x[n] - kept) * 1.2e-38f;
    p[n] = all(8.73483633e-2f);
  }
#pragma GCC unroll 7
  for (int step = 0; step < 7; ++step)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) p[n] = p[n] * f[n] + steps[step];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) x[n] = whole[n] + (p[n] * f[n] * f[n] + f[n]);
}

inline v4 half(v8 x, int which) {
  v4 parts[2];
  std::memcpy(parts, &x, sizeof parts);
  return parts[which];
}

inline float sum(v8 x) {
  const v4 four = half(x, 0) + half(x, 1);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float largest(v8 x) {
  const v4 a = half(x, 0), b = half(x, 1), four = a > b ? a : b;
  return std::max(std::max(four[0], four[2]), std::max(four[1], four[3]));
}

// e^x for x <= 88, to about one unit in the last place; 0 below the normal numbers, NaN for NaN. (Cephes' polynomial.)
// Several at once, step by step: one alone is a chain in which every step waits for the one before.
template <int N>
inline void exponentials(v8 (&x)[N]) {
  const v8 shifter = all(12582912.0f);
  const float steps[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  v8 power[N], r[N], p[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const v8 whole = x[n] * 1.44269504088896341f + shifter;
    power[n] = (v8)(((i8)whole - (0x4b400000 - 127)) << 23);
    r[n] = whole - shifter;
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) p[n] = x[n] - r[n] * 0.693359375f;
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    r[n] = p[n] + r[n] * 2.12194440e-4f;
    p[n] = all(1.9875691500e-4f);
  }
#pragma GCC unroll 5
  for (int step = 0; step < 5; ++step)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) p[n] = p[n] * r[n] + steps[step];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) p[n] = p[n] * r[n] * r[n] + r[n] + 1.0f;
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) x[n] = pick(x[n] < -87.0f, all(0), p[n] * power[n]);
}

inline v8 exponential(v8 x) {
  v8 one[1] = {x};
  exponentials(one);
  return one[0];
}

constexpr long PANEL = 16;
#ifdef __AVX512VL__
constexpr long MOST = 8;  // rows whose two accumulators fit into 32 registers
#else
constexpr long MOST = 6;
#endif

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

// c[M][16] = or += a b; rows of a lie `lda` apart, and `step` leads from one number of a row to the next.
template <int M>
__attribute__((always_inline)) inline void panel(const float* a, long lda, long step, const float* b, long ldb, float* c,
                                                 long ldc, long count, bool add) {
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
      const v8 x = all(a[m * lda]);
      left[m] += x * b0;
      right[m] += x * b1;
    }
    a += step;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    store(c + m * ldc, left[m]);
    store(c + m * ldc + 8, right[m]);
  }
}

// c (rows x columns) = or += a b, columns a multiple of 16; the next panel of b is `step` further on. a is read along its
// rows or, transposed, along its columns.
template <bool TRANSPOSED>
void product(const float* a, long lda, const float* b, long ldb, long step, float* c, long ldc, long rows, long columns,
             long count, bool add) {
  for (long n = 0; n < columns; n += PANEL, b += step)
    in_blocks(rows, [&](auto m, long first) {
      if (TRANSPOSED) panel<m.value>(a + first, 1, lda, b, ldb, c + first * ldc + n, ldc, count, add);
      else panel<m.value>(a + first * lda, lda, 1, b, ldb, c + first * ldc + n, ldc, count, add);
    });
}

// Every piece of work once, on so many threads: PyTorch's own where OpenMP is at hand, because those are awake.
template <class Work>
void share(long threads, long count, Work work) {
  std::atomic<long> next{0};
  auto run = [&] {
    for (long n = next++; n < count; n = next++) work(n);
  };
  threads = std::min(threads, count);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
  run();
#else
  std::vector<std::thread> others;
  for (long t = 1; t < threads; ++t) others.emplace_back(run);
  run();
  for (auto& other : others) other.join();
#endif
}

}  // namespace
