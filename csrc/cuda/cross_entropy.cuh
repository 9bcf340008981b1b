#pragma once
#include "common.cuh"

namespace ptdp {
namespace {

constexpr float kLowest = -3.402823466e38f;

template <class T>
__global__ void cross_entropy_stats(const CrossEntropyStats a, int64_t begin, int64_t end) {
  PTDP_SHARED(float, shared, 32);
  PTDP_ITEMS(row, begin, end) {
    const T* x = static_cast<const T*>(a.logits) + row * a.width;
    float base = kLowest;  // finite, so that a shard of -inf gives sums of 0 and not of NaN
    PTDP_EACH(j, a.width) base = fmaxf(base, widen(x[j]));
    base = block_max(base, shared);
    float sum_exp = 0, sum_shifted = 0;
    PTDP_EACH(j, a.width) {
      const float v = widen(x[j]) - base;
      sum_exp += expf(v);
      sum_shifted += v;
    }
    sum_exp = block_sum(sum_exp, shared);
    sum_shifted = block_sum(sum_shifted, shared);
    if (threadIdx.x == 0) {
      a.peak[row] = base;
      a.sum_exp[row] = sum_exp;
      a.sum_shifted[row] = sum_shifted;
    }
  }
}

template <class T>
__global__ void cross_entropy_gradient(const CrossEntropyGradient a, int64_t begin, int64_t end) {
  PTDP_ITEMS(row, begin, end) {
    const T* x = static_cast<const T*>(a.logits) + row * a.width;
    T* dx = static_cast<T*>(a.dx) + row * a.width;
    const float normalizer = a.normalizer[row], scale = a.scale[row];
    const int64_t target = a.target[row];
    PTDP_EACH(j, a.width) {
      const float hit = j == target ? a.hit : 0.0f;
      dx[j] = narrow<T>(scale == 0 ? 0.0f : (expf(widen(x[j]) - normalizer) - a.uniform - hit) * scale);
    }
  }
}

}  // namespace
}  // namespace ptdp
