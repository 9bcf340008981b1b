#pragma once
#include "common.cuh"

namespace ptdp {
namespace {

__device__ inline bool is_masked(const uint8_t* mask, int64_t step, int64_t j) {
  return mask != nullptr && mask[j * step] != 0;
}

template <class T>
__global__ void softmax(const Softmax a, int64_t begin, int64_t end) {
  PTDP_SHARED(float, shared, 32);
  PTDP_ITEMS(row, begin, end) {
    const T* x = static_cast<const T*>(a.x) + row * a.keys;
    T* y = static_cast<T*>(a.y) + row * a.keys;
    const uint8_t* mask = a.mask ? a.mask + a.mask_rows.at(row) : nullptr;
    const int64_t seen = visible_keys(row, a.queries, a.keys, a.causal);
    float top = -INFINITY;
    PTDP_EACH(j, seen) top = is_masked(mask, a.mask_step, j) ? top : fmaxf(top, widen(x[j]) * a.scale);
    top = block_max(top, shared);
    const float base = top == -INFINITY ? 0.0f : top;
    float total = 0;
    PTDP_EACH(j, seen) total += is_masked(mask, a.mask_step, j) ? 0.0f : expf(widen(x[j]) * a.scale - base);
    total = block_sum(total, shared);
    const float inverse = mask && total == 0 ? 0.0f : 1.0f / total;
    PTDP_EACH(j, a.keys) {
      const bool is_seen = j < seen && !is_masked(mask, a.mask_step, j);
      y[j] = narrow<T>(is_seen ? expf(widen(x[j]) * a.scale - base) * inverse : 0.0f);
    }
  }
}

template <class T>
__global__ void softmax_backward(const SoftmaxBackward a, int64_t begin, int64_t end) {
  PTDP_SHARED(float, shared, 32);
  PTDP_ITEMS(row, begin, end) {
    const T* g = static_cast<const T*>(a.grad) + row * a.keys;
    const T* y = static_cast<const T*>(a.y) + row * a.keys;
    T* dx = static_cast<T*>(a.dx) + row * a.keys;
    const int64_t seen = visible_keys(row, a.queries, a.keys, a.causal);
    float dot = 0;
    PTDP_EACH(j, seen) dot += widen(g[j]) * widen(y[j]);
    dot = block_sum(dot, shared);
    PTDP_EACH(j, a.keys) dx[j] = narrow<T>(j < seen ? a.scale * widen(y[j]) * (widen(g[j]) - dot) : 0.0f);
  }
}

}  // namespace
}  // namespace ptdp
