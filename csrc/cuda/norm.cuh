#pragma once
#include "common.cuh"

namespace ptdp {
namespace {

__device__ inline float at_or(const float* p, int64_t j, float otherwise) { return p ? p[j] : otherwise; }

// w, moved away from 0 so that one may divide by it.
__device__ inline float divisor(float w, float eps) { return fabsf(w) < eps ? (w < 0 ? -eps : eps) : w; }

template <class T>
__global__ void norm(const Norm a, int64_t begin, int64_t end) {
  PTDP_SHARED(float, shared, 32);
  PTDP_ITEMS(row, begin, end) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    T* y = static_cast<T*>(a.y) + row * a.width;
    float mean = 0;
    if (a.centers) {
      PTDP_EACH(j, a.width) mean += widen(x[j]);
      mean = block_sum(mean, shared) / a.width;
    }
    float squares = 0;
    PTDP_EACH(j, a.width) squares += (widen(x[j]) - mean) * (widen(x[j]) - mean);
    const float rstd = 1.0f / sqrtf(block_sum(squares, shared) / a.width + a.eps);
    if (threadIdx.x == 0) {
      if (a.centers) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    PTDP_EACH(j, a.width) {
      y[j] = narrow<T>((widen(x[j]) - mean) * rstd * at_or(a.weight, j, 1.0f) + at_or(a.bias, j, 0.0f));
    }
  }
}

template <class T>
__device__ inline float normal_at(const NormBackward& a, const T* saved, int64_t j, float mean, float rstd) {
  const float v = widen(saved[j]);
  if (!a.saved_is_output) return (v - mean) * rstd;
  return (v - at_or(a.bias, j, 0.0f)) / divisor(at_or(a.weight, j, 1.0f), a.eps);
}

// A block adds the rows of its part; each thread owns columns of the sums over rows.
template <class T>
__global__ void norm_backward(const NormBackward a, int64_t begin, int64_t end) {
  PTDP_SHARED(float, shared, 32);
  PTDP_ITEMS(part, begin, end) {
    for (int64_t row = a.parts.first(part); row < a.parts.last(part); ++row) {
      const T* g = static_cast<const T*>(a.grad) + row * a.width;
      const T* saved = static_cast<const T*>(a.saved) + row * a.width;
      T* dx = static_cast<T*>(a.dx) + row * a.width;
      const float mean = a.centers ? a.mean[row] : 0.0f, rstd = a.rstd[row];
      float along = 0, middle = 0;
      PTDP_EACH(j, a.width) {
        const float scaled = widen(g[j]) * at_or(a.weight, j, 1.0f);
        along += scaled * normal_at(a, saved, j, mean, rstd);
        middle += scaled;
      }
      along = block_sum(along, shared) / a.width;
      middle = a.centers ? block_sum(middle, shared) / a.width : 0.0f;
      PTDP_EACH(j, a.width) {
        const float grad = widen(g[j]), h = normal_at(a, saved, j, mean, rstd);
        dx[j] = narrow<T>((grad * at_or(a.weight, j, 1.0f) - middle - h * along) * rstd);
        if (a.dweight) a.dweight[part * a.width + j] += grad * h;
        if (a.dbias) a.dbias[part * a.width + j] += grad;
      }
    }
  }
}

}  // namespace
}  // namespace ptdp
