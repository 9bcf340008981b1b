#pragma once
#include <vector>

#include "vector.h"

namespace ptdp {
namespace {

// keep[j] = 1 / (1 - p) where element j of the row stays, else 0.
inline void draw_row(float* keep, int64_t seed, int64_t row, int64_t width, float p) {
  const uint32_t below = drop_below(p);
  const float kept = p < 1 ? 1.0f / (1.0f - p) : 0.0f;
  const uint64_t first = static_cast<uint64_t>(row) * static_cast<uint64_t>(width);
  for (int64_t j = 0; j < width; ++j) keep[j] = draw(static_cast<uint64_t>(seed), first + j) < below ? 0.0f : kept;
}

template <class T>
int dropout_add(const DropoutAdd a, int64_t begin, int64_t end) {
  std::vector<float> keep(a.width, 1.0f);
  const OrElse bias(a.bias, a.width, 0.0f);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    const T* residual = static_cast<const T*>(a.residual) + row * a.width;
    T* y = static_cast<T*>(a.y) + row * a.width;
    if (a.p > 0) draw_row(keep.data(), *a.seed, row, a.width, a.p);
    fill(y, a.width, [x, residual, b = bias.data, keeps = keep.data()](int64_t j, auto n) {
      const V v = load(x + j, n) + load(b + j, n), k = load(keeps + j, n);
      return load(residual + j, n) + (k == 0 ? V{} : v * k);
    });
  }
  return 0;
}

template <class T>
int dropout_add_backward(const DropoutAddBackward a, int64_t begin, int64_t end) {
  std::vector<float> keep(a.width, 1.0f);
  SumsOrElse sums(a.dbias, a.width);
  for (int64_t part = begin; part < end; ++part) {
    float* dbias = sums.of(part);
    for (int64_t row = a.parts.first(part); row < a.parts.last(part); ++row) {
      const T* g = static_cast<const T*>(a.grad) + row * a.width;
      T* dx = static_cast<T*>(a.dx) + row * a.width;
      if (a.p > 0) draw_row(keep.data(), *a.seed, row, a.width, a.p);
      fill(dx, a.width, [g, dbias, keeps = keep.data()](int64_t j, auto n) {
        const V k = load(keeps + j, n), d = k == 0 ? V{} : load(g + j, n) * k;
        store(dbias + j, load(dbias + j, n) + d, n);
        return d;
      });
    }
  }
  return 0;
}

}  // namespace
}  // namespace ptdp
