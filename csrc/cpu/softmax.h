#pragma once
#include <algorithm>
#include <vector>

#include "vector.h"

namespace ptdp {
namespace {

template <class T>
int softmax(const Softmax a, int64_t begin, int64_t end) {
  std::vector<float> scores(a.keys);
  float* e = scores.data();
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.keys;
    T* y = static_cast<T*>(a.y) + row * a.keys;
    const uint8_t* mask = a.mask ? a.mask + a.mask_rows.at(row) : nullptr;
    int64_t seen = visible_keys(row, a.queries, a.keys, a.causal);
    if (mask && a.mask_step == 0) {  // one mask for the row
      seen = *mask ? 0 : seen;
      mask = nullptr;
    }
    auto scaled = [x, e, scale = a.scale](int64_t j, auto n) {
      const V v = load(x + j, n) * scale;
      store(e + j, v, n);
      return v;
    };
    auto masked = [scaled, e, mask](int64_t j, auto n) {
      const V v = load(mask + j, n) != 0 ? all(-kInfinity) : scaled(j, n);
      store(e + j, v, n);
      return v;
    };
    const float top = mask ? max(seen, masked) : max(seen, scaled);
    const float base = top == -kInfinity ? 0.0f : top;
    const float total = sum(seen, [&](int64_t j, auto n) {
      const V v = exp<T>(load(e + j, n) - base);
      store(e + j, v, n);
      return v;
    });
    const bool is_masked = a.mask != nullptr && total == 0;
    const float inverse = is_masked ? 0.0f : 1.0f / total;
    fill(y, seen, [&](int64_t j, auto n) { return load(e + j, n) * inverse; });
    std::fill(y + seen, y + a.keys, T{});
  }
  return 0;
}

template <class T>
int softmax_backward(const SoftmaxBackward a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* g = static_cast<const T*>(a.grad) + row * a.keys;
    const T* y = static_cast<const T*>(a.y) + row * a.keys;
    T* dx = static_cast<T*>(a.dx) + row * a.keys;
    const int64_t seen = visible_keys(row, a.queries, a.keys, a.causal);
    const float dot = sum(seen, [&](int64_t j, auto n) { return load(g + j, n) * load(y + j, n); });
    fill(dx, seen, [&](int64_t j, auto n) { return load(y + j, n) * a.scale * (load(g + j, n) - dot); });
    std::fill(dx + seen, dx + a.keys, T{});
  }
  return 0;
}

}  // namespace
}  // namespace ptdp
