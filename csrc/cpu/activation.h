#pragma once
#include "norm.h"
#include "vector.h"

namespace ptdp {
namespace {

inline V sigmoid(V x) { return 1.0f / (exp(-x) + 1.0f); }

// gelu(x) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3), which is the form by tanh.
inline V gelu_gate(V x) { return sigmoid(x * 1.5957691216f * (x * x * 0.044715f + 1.0f)); }
inline V gelu_slope(V x) {
  const V gate = gelu_gate(x);
  const V du = (x * x * 0.134145f + 1.0f) * 1.5957691216f;
  return gate + x * gate * (1.0f - gate) * du;
}

template <class T>
int bias_gelu(const BiasGelu a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    T* y = static_cast<T*>(a.y) + row * a.width;
    each(a.width, [&](int64_t j, auto n) {
      const V v = load(x + j, n) + load_or(a.bias, j, n, 0.0f);
      store(y + j, v * gelu_gate(v), n);
    });
  }
  return 0;
}

template <class T>
int bias_gelu_backward(const BiasGeluBackward a, int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    float* dbias = a.dbias ? a.dbias + part * a.width : nullptr;
    for (int64_t row = a.parts.first(part); row < a.parts.last(part); ++row) {
      const T* g = static_cast<const T*>(a.grad) + row * a.width;
      const T* x = static_cast<const T*>(a.x) + row * a.width;
      T* dx = static_cast<T*>(a.dx) + row * a.width;
      each(a.width, [&](int64_t j, auto n) {
        const V d = load(g + j, n) * gelu_slope(load(x + j, n) + load_or(a.bias, j, n, 0.0f));
        store(dx + j, d, n);
        add_to(dbias, j, d, n);
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
    each(a.width, [&](int64_t j, auto n) {
      const V v = load(gate + j, n);
      store(y + j, v * sigmoid(v) * load(up + j, n), n);
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
    each(a.width, [&](int64_t j, auto n) {
      const V v = load(gate + j, n), grad = load(g + j, n), s = sigmoid(v);
      store(dup + j, grad * v * s, n);
      store(dgate + j, grad * load(up + j, n) * s * ((1.0f - s) * v + 1.0f), n);
    });
  }
  return 0;
}

}  // namespace
}  // namespace ptdp
