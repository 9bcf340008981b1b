#pragma once
#include <algorithm>

#include "vector.h"

namespace ptdp {
namespace {

template <class T>
int rotary(const Rotary a, int64_t begin, int64_t end) {
  const float sign = a.inverse ? -1.0f : 1.0f;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + a.x_rows.at(row);
    const float* cos = a.cos + a.cos_rows.at(row);
    const float* sin = a.sin + a.sin_rows.at(row);
    T* y = static_cast<T*>(a.y) + row * a.width;
    each(a.half, [&](int64_t j, auto n) {
      const V c = load(cos + j, n), s = load(sin + j, n) * sign;
      const V low = load(x + j, n), high = load(x + a.half + j, n);
      store(y + j, low * c - high * s, n);
      store(y + a.half + j, high * c + low * s, n);
    });
    std::copy(x + 2 * a.half, x + a.width, y + 2 * a.half);
  }
  return 0;
}

}  // namespace
}  // namespace ptdp
