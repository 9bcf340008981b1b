#pragma once
#include <algorithm>

#include "vector.h"

namespace ptdp {
namespace {

template <class T>
int cross_entropy_stats(const CrossEntropyStats a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.logits) + row * a.width;
    // a finite base, so that a shard of -inf gives sums of 0 and not of NaN
    const float base = std::max(max(a.width, [&](int64_t j, auto n) { return load(x + j, n); }), kLowest);
    V shifted{};
    a.sum_exp[row] = sum(a.width, [&](int64_t j, auto n) {
      const V v = load(x + j, n) - base;
      shifted += first_lanes(v, static_cast<int64_t>(n), 0.0f);
      return exp(v);
    });
    a.sum_shifted[row] = lanes_sum(shifted);
    a.peak[row] = base;
  }
  return 0;
}

template <class T>
int cross_entropy_gradient(const CrossEntropyGradient a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.logits) + row * a.width;
    T* dx = static_cast<T*>(a.dx) + row * a.width;
    const float normalizer = a.normalizer[row], scale = a.scale[row];
    const int64_t target = a.target[row];
    if (scale == 0) {
      std::fill(dx, dx + a.width, T{});
      continue;
    }
    fill(dx, a.width, [&](int64_t j, auto n) { return (exp<T>(load(x + j, n) - normalizer) - a.uniform) * scale; });
    if (target >= 0) {
      const float probability = exp<T>(all(widen(x[target]) - normalizer))[0];
      dx[target] = narrow<T>((probability - a.uniform - a.hit) * scale);
    }
  }
  return 0;
}

}  // namespace
}  // namespace ptdp
