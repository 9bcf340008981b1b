#pragma once
#include "vector.h"

namespace ptdp {
namespace {

template <class N>
inline V load_or(const float* p, int64_t j, N n, float otherwise) {
  return p ? load(p + j, n) : all(otherwise);
}

template <class N>
inline void add_to(float* p, int64_t j, V v, N n) {
  if (p) store(p + j, load(p + j, n) + v, n);
}

// w, moved away from 0 so that one may divide by it.
inline V divisor(V w, float eps) {
  const V safe = w < 0 ? all(-eps) : all(eps);
  return (w < 0 ? -w : w) < eps ? safe : w;
}

template <class T>
int norm(const Norm a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    T* y = static_cast<T*>(a.y) + row * a.width;
    float mean = 0;
    if (a.centers) {
      mean = sum(a.width, [&](int64_t j, auto n) { return load(x + j, n); }) / a.width;
      a.mean[row] = mean;
    }
    const float squares = sum(a.width, [&](int64_t j, auto n) {
      const V d = load(x + j, n) - mean;
      return d * d;
    });
    const float rstd = 1.0f / __builtin_sqrtf(squares / a.width + a.eps);
    a.rstd[row] = rstd;
    each(a.width, [&](int64_t j, auto n) {
      const V normal = (load(x + j, n) - mean) * rstd;
      store(y + j, normal * load_or(a.weight, j, n, 1.0f) + load_or(a.bias, j, n, 0.0f), n);
    });
  }
  return 0;
}

template <class T, bool kFromOutput>
inline void norm_backward_row(const NormBackward& a, int64_t row, float* dweight, float* dbias) {
  const T* g = static_cast<const T*>(a.grad) + row * a.width;
  const T* saved = static_cast<const T*>(a.saved) + row * a.width;
  T* dx = static_cast<T*>(a.dx) + row * a.width;
  const float mean = a.centers ? a.mean[row] : 0.0f, rstd = a.rstd[row];
  auto normal = [&](int64_t j, auto n) {
    if (!kFromOutput) return (load(saved + j, n) - mean) * rstd;
    return (load(saved + j, n) - load_or(a.bias, j, n, 0.0f)) / divisor(load_or(a.weight, j, n, 1.0f), a.eps);
  };
  auto scaled = [&](int64_t j, auto n) { return load(g + j, n) * load_or(a.weight, j, n, 1.0f); };
  V total{};
  const float along = sum(a.width, [&](int64_t j, auto n) {
    const V v = scaled(j, n);  // 0 beyond the row, as what is loaded there
    total += v;
    return v * normal(j, n);
  }) / a.width;
  const float middle = a.centers ? lanes_sum(total) / a.width : 0.0f;
  each(a.width, [&](int64_t j, auto n) {
    const V h = normal(j, n), grad = load(g + j, n);
    store(dx + j, (scaled(j, n) - middle - h * along) * rstd, n);
    add_to(dweight, j, grad * h, n);
    add_to(dbias, j, grad, n);
  });
}

template <class T, bool kFromOutput>
int norm_backward_parts(const NormBackward a, int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    float* dweight = a.dweight ? a.dweight + part * a.width : nullptr;
    float* dbias = a.dbias ? a.dbias + part * a.width : nullptr;
    for (int64_t row = a.parts.first(part); row < a.parts.last(part); ++row) {
      norm_backward_row<T, kFromOutput>(a, row, dweight, dbias);
    }
  }
  return 0;
}

template <class T>
int norm_backward(const NormBackward a, int64_t begin, int64_t end) {
  return a.saved_is_output ? norm_backward_parts<T, true>(a, begin, end) : norm_backward_parts<T, false>(a, begin, end);
}

}  // namespace
}  // namespace ptdp
