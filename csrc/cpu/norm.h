#pragma once
#include "vector.h"

namespace ptdp {
namespace {

// w, moved away from 0 so that one may divide by it.
inline V divisor(V w, float eps) {
  const V safe = w < 0 ? all(-eps) : all(eps);
  return (w < 0 ? -w : w) < eps ? safe : w;
}

template <class T>
int norm(const Norm a, int64_t begin, int64_t end) {
  const OrElse weight(a.weight, a.width, 1.0f), bias(a.bias, a.width, 0.0f);
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
    fill(y, a.width, [&](int64_t j, auto n) {
      const V normal = (load(x + j, n) - mean) * rstd;
      return normal * load(weight.data + j, n) + load(bias.data + j, n);
    });
  }
  return 0;
}

template <class T, bool kFromOutput>
inline void norm_backward_row(const NormBackward& a, int64_t row, const float* weight, const float* bias,
                              float* scaled, float* dweight, float* dbias) {
  const T* g = static_cast<const T*>(a.grad) + row * a.width;
  const T* saved = static_cast<const T*>(a.saved) + row * a.width;
  T* dx = static_cast<T*>(a.dx) + row * a.width;
  const float mean = a.centers ? a.mean[row] : 0.0f, rstd = a.rstd[row], eps = a.eps;
  auto normal = [=](int64_t j, auto n) {
    if (!kFromOutput) return (load(saved + j, n) - mean) * rstd;
    return (load(saved + j, n) - load(bias + j, n)) / divisor(load(weight + j, n), eps);
  };
  V total{};
  const float along = sum(a.width, [&](int64_t j, auto n) {
    const V v = load(g + j, n) * load(weight + j, n);  // 0 beyond the row, as what is loaded there
    store(scaled + j, v, n);  // rounded once, so that a row of one cancels exactly
    total += v;
    return v * normal(j, n);
  }) / a.width;
  const float middle = a.centers ? lanes_sum(total) / a.width : 0.0f;
  fill(dx, a.width, [=](int64_t j, auto n) {
    const V h = normal(j, n), grad = load(g + j, n);
    store(dweight + j, load(dweight + j, n) + grad * h, n);
    store(dbias + j, load(dbias + j, n) + grad, n);
    return (load(scaled + j, n) - middle - h * along) * rstd;
  });
}

template <class T, bool kFromOutput>
int norm_backward_parts(const NormBackward a, int64_t begin, int64_t end) {
  const OrElse weight(a.weight, a.width, 1.0f), bias(a.bias, a.width, 0.0f);
  SumsOrElse dweight(a.dweight, a.width), dbias(a.dbias, a.width);
  std::vector<float> scaled(a.width);
  for (int64_t part = begin; part < end; ++part) {
    for (int64_t row = a.parts.first(part); row < a.parts.last(part); ++row) {
      norm_backward_row<T, kFromOutput>(a, row, weight.data, bias.data, scaled.data(), dweight.of(part),
                                        dbias.of(part));
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
