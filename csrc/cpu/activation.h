#pragma once
#include "vector.h"

namespace ptdp {
namespace {

template <class T>
inline V sigmoid(V x) {
  return logistic2<T>(x * -kLog2E);
}

// gelu(x) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3), which is the form by tanh.
constexpr float kSlope = 1.5957691216f, kCubic = 0.044715f;

template <class T>
inline V gelu_gate(V x) {
  return logistic2<T>((x * x * (-kSlope * kCubic * kLog2E) - kSlope * kLog2E) * x);
}
template <class T>
inline V gelu_slope(V x) {
  const V gate = gelu_gate<T>(x), du = x * x * (3 * kSlope * kCubic) + kSlope;
  return gate * (x * du * (1.0f - gate) + 1.0f);
}

template <class T>
int bias_gelu(const BiasGelu a, int64_t begin, int64_t end) {
  const OrElse bias(a.bias, a.width, 0.0f);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    T* y = static_cast<T*>(a.y) + row * a.width;
    fill(y, a.width, [x, b = bias.data](int64_t j, auto n) {
      const V v = load(x + j, n) + load(b + j, n);
      return v * gelu_gate<T>(v);
    });
  }
  return 0;
}

template <class T>
int bias_gelu_backward(const BiasGeluBackward a, int64_t begin, int64_t end) {
  const OrElse bias(a.bias, a.width, 0.0f);
  SumsOrElse sums(a.dbias, a.width);
  for (int64_t part = begin; part < end; ++part) {
    float* dbias = sums.of(part);
    for (int64_t row = a.parts.first(part); row < a.parts.last(part); ++row) {
      const T* g = static_cast<const T*>(a.grad) + row * a.width;
      const T* x = static_cast<const T*>(a.x) + row * a.width;
      T* dx = static_cast<T*>(a.dx) + row * a.width;
      fill(dx, a.width, [g, x, b = bias.data, dbias](int64_t j, auto n) {
        const V d = load(g + j, n) * gelu_slope<T>(load(x + j, n) + load(b + j, n));
        store(dbias + j, load(dbias + j, n) + d, n);
        return d;
      });
    }
  }
  return 0;
}

template <class T>
int swiglu(const SwiGlu a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(a.gate) + row * a.gate_step;
    const T* up = static_cast<const T*>(a.up) + row * a.up_step;
    T* y = static_cast<T*>(a.y) + row * a.width;
    fill(y, a.width, [=](int64_t j, auto n) {
      const V v = load(gate + j, n);
      return v * sigmoid<T>(v) * load(up + j, n);
    });
  }
  return 0;
}

template <class T>
int swiglu_backward(const SwiGluBackward a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* g = static_cast<const T*>(a.grad) + row * a.width;
    const T* gate = static_cast<const T*>(a.gate) + row * a.gate_step;
    const T* up = static_cast<const T*>(a.up) + row * a.up_step;
    T* dgate = static_cast<T*>(a.dgate) + row * a.width;
    T* dup = static_cast<T*>(a.dup) + row * a.width;
    fill(dgate, a.width, [=](int64_t j, auto n) {
      const V v = load(gate + j, n), grad = load(g + j, n), s = sigmoid<T>(v);
      store(dup + j, grad * v * s, n);
      return grad * load(up + j, n) * s * ((1.0f - s) * v + 1.0f);
    });
  }
  return 0;
}

}  // namespace
}  // namespace ptdp
