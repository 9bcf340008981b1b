#pragma once
#include "common.cuh"

namespace ptdp {
namespace {

template <class T>
__global__ void rotary(const Rotary a, int64_t begin, int64_t end) {
  PTDP_ITEMS(row, begin, end) {
    const T* x = static_cast<const T*>(a.x) + a.x_rows.at(row);
    const float* cos = a.cos + a.cos_rows.at(row);
    const float* sin = a.sin + a.sin_rows.at(row);
    T* y = static_cast<T*>(a.y) + row * a.width;
    PTDP_EACH(j, a.half) {
      const float c = cos[j], s = a.inverse ? -sin[j] : sin[j], low = widen(x[j]), high = widen(x[a.half + j]);
      y[j] = narrow<T>(low * c - high * s);
      y[a.half + j] = narrow<T>(high * c + low * s);
    }
    PTDP_EACH(j, a.width - 2 * a.half) y[2 * a.half + j] = x[2 * a.half + j];
  }
}

}  // namespace
}  // namespace ptdp
