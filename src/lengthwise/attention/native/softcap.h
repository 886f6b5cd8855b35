// A cap on the content, by the cheapest way that is exact for the numbers at hand.

#pragma once

#include "vectors.h"

namespace {

constexpr float FEW_TERMS = 0.35f, MORE_TERMS = 0.54f;  // up to where the two polynomials for tanh are exact

// content = cap tanh(x / cap). With few terms |x| / cap must be at most FEW_TERMS, with more MORE_TERMS, and cap is in
// the coefficients; the polynomials are minimax fits of our own.
enum Tanh { FEW, MORE, EXACT };
template <Tanh HOW>
struct Cap {
  float cap, inverse, square;
  v8 c1, c2, c3, c4;

  explicit Cap(float cap) : cap(cap), inverse(1 / cap), square(inverse * inverse) {
    const float few[4] = {-0.333326632f, 0.132998254f, -0.0491485006f, 0};
    const float more[4] = {-0.33332996f, 0.13321931f, -0.0527532707f, 0.0166003706f};
    const float* c = HOW == FEW ? few : more;
    c1 = all(c[0] * square);
    c2 = all(c[1] * square * square);
    c3 = all(c[2] * square * square * square);
    c4 = all(c[3] * square * square * square * square);
  }

  v8 operator()(v8 x) const {
    if (HOW != EXACT) {
      const v8 z = x * x;
      const v8 last = HOW == FEW ? c3 : c4 * z + c3;
      return x * (((last * z + c2) * z + c1) * z) + x;
    }
    const v8 y = x * inverse, z = y * y, size = absolute(y), power = exponential(size * -2.0f);
    v8 p = z * -5.43945232e-3f + 2.03979786e-2f;
    p = p * z - 5.36650543e-2f;
    p = p * z + 1.33305436e-1f;
    p = p * z - 3.33332489e-1f;
    const v8 near = x * (p * z) + x, far = cap - 2.0f * cap * power / (1.0f + power);
    return pick(size <= 0.66f, near, (v8)((i8)far | ((i8)x & (int32_t)0x80000000)));
  }
};

// A softcap, its coefficients made once for a head.
struct Softcap {
  float cap;
  bool ordinary;  // whether the eighth power of cap is a float32
  Cap<FEW> few;
  Cap<MORE> more;
  Cap<EXACT> exact;

  explicit Softcap(float cap) : cap(cap), ordinary(cap > 1e-3f && cap < 1e4f), few(cap), more(cap), exact(cap) {}

  // Call use(content) with what is cheapest and exact for some products, a multiple of 8, none of them above `bound`.
  template <class Use>
  void apply(const float* s, long count, float bound, Use use) const {
    if (!(bound <= MORE_TERMS * cap)) {  // the lengths of q and k do not show it, so look at the products
      v8 top = all(0);
      for (long j = 0; j < count; j += 8) {
        const v8 x = absolute(load(s + j));
        top = pick(x > top, x, top);
      }
      bound = largest(top);
    }
    if (ordinary && bound <= FEW_TERMS * cap) use(few);
    else if (ordinary && bound <= MORE_TERMS * cap) use(more);
    else use(exact);
  }
};

}  // namespace
