#pragma once
#include "common.cuh"
#include "norm.cuh"

namespace ptdp {
namespace {

// 1 / (1 - p) where the element stays, else 0; 1 where nothing is dropped.
__device__ inline float kept(const int64_t* seed, int64_t index, float p) {
  if (p <= 0) return 1.0f;
  const bool is_dropped = draw(static_cast<uint64_t>(*seed), static_cast<uint64_t>(index)) < drop_below(p);
  return is_dropped || p >= 1 ? 0.0f : 1.0f / (1.0f - p);
}

template <class T>
__global__ void dropout_add(const DropoutAdd a, int64_t begin, int64_t end) {
  PTDP_ITEMS(row, begin, end) {
    const int64_t first = row * a.width;
    PTDP_EACH(j, a.width) {
      const float v = widen(static_cast<const T*>(a.x)[first + j]) + at_or(a.bias, j, 0.0f);
      const float k = kept(a.seed, first + j, a.p), residual = widen(static_cast<const T*>(a.residual)[first + j]);
      static_cast<T*>(a.y)[first + j] = narrow<T>(residual + (k == 0 ? 0.0f : v * k));
    }
  }
}

template <class T>
__global__ void dropout_add_backward(const DropoutAddBackward a, int64_t begin, int64_t end) {
  PTDP_ITEMS(part, begin, end) {
    for (int64_t row = a.parts.first(part); row < a.parts.last(part); ++row) {
      PTDP_EACH(j, a.width) {
        const int64_t index = row * a.width + j;
        const float k = kept(a.seed, index, a.p);
        const float d = k == 0 ? 0.0f : widen(static_cast<const T*>(a.grad)[index]) * k;
        static_cast<T*>(a.dx)[index] = narrow<T>(d);
        if (a.dbias) a.dbias[part * a.width + j] += d;
      }
    }
  }
}

}  // namespace
}  // namespace ptdp
