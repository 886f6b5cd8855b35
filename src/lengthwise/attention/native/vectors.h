// Vectors of eight floats, and what both kernels do with them.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
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
inline v8 pick(i8 condition, v8 yes, v8 no) { return (v8)(((i8)yes & condition) | ((i8)no & ~condition)); }
inline v8 absolute(v8 x) { return (v8)((i8)x & 0x7fffffff); }

typedef double v4d __attribute__((vector_size(32), aligned(8)));
typedef float v4 __attribute__((vector_size(16), aligned(4)));

inline float sum(v8 x) {
  float total = 0;
  for (int lane = 0; lane < 8; ++lane) total += x[lane];
  return total;
}

inline float largest(v8 x) {
  float most = x[0];
  for (int lane = 1; lane < 8; ++lane) most = std::max(most, x[lane]);
  return most;
}

// e^x for x <= 88, to about one unit in the last place; 0 below the normal numbers, NaN for NaN. (Cephes' polynomial.)
inline v8 exponential(v8 x) {
  const v8 shifter = all(12582912.0f);
  v8 n = x * 1.44269504088896341f + shifter;
  i8 power = ((i8)n - 0x4b400000) << 23;
  n = n - shifter;
  v8 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  v8 p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  v8 scaled = (v8)((i8)p + power);
  scaled = pick(x > -87.0f, scaled, all(0));
  return pick(x == x, scaled, x);
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
