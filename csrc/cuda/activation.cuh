#pragma once
#include "common.cuh"
#include "norm.cuh"

namespace ptdp {
namespace {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// gelu(x) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3), which is the form by tanh.
__device__ inline float gelu_gate(float x) { return sigmoid(1.5957691216f * x * (1.0f + 0.044715f * x * x)); }
__device__ inline float gelu_slope(float x) {
  const float gate = gelu_gate(x);
  return gate + x * gate * (1.0f - gate) * 1.5957691216f * (1.0f + 0.134145f * x * x);
}

template <class T>
__global__ void bias_gelu(const BiasGelu a, int64_t begin, int64_t end) {
  PTDP_ITEMS(row, begin, end) {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    T* y = static_cast<T*>(a.y) + row * a.width;
    PTDP_EACH(j, a.width) {
      const float v = widen(x[j]) + at_or(a.bias, j, 0.0f);
      y[j] = narrow<T>(v * gelu_gate(v));
    }
  }
}

template <class T>
__global__ void bias_gelu_backward(const BiasGeluBackward a, int64_t begin, int64_t end) {
  PTDP_ITEMS(part, begin, end) {
    for (int64_t row = a.parts.first(part); row < a.parts.last(part); ++row) {
      const T* g = static_cast<const T*>(a.grad) + row * a.width;
      const T* x = static_cast<const T*>(a.x) + row * a.width;
      T* dx = static_cast<T*>(a.dx) + row * a.width;
      PTDP_EACH(j, a.width) {
        const float d = widen(g[j]) * gelu_slope(widen(x[j]) + at_or(a.bias, j, 0.0f));
        dx[j] = narrow<T>(d);
        if (a.dbias) a.dbias[part * a.width + j] += d;
      }
    }
  }
}

template <class T>
__global__ void swiglu(const SwiGlu a, int64_t begin, int64_t end) {
  PTDP_ITEMS(row, begin, end) {
    const T* gate = static_cast<const T*>(a.gate) + row * a.gate_step;
    const T* up = static_cast<const T*>(a.up) + row * a.up_step;
    T* y = static_cast<T*>(a.y) + row * a.width;
    PTDP_EACH(j, a.width) y[j] = narrow<T>(widen(gate[j]) * sigmoid(widen(gate[j])) * widen(up[j]));
  }
}

template <class T>
__global__ void swiglu_backward(const SwiGluBackward a, int64_t begin, int64_t end) {
  PTDP_ITEMS(row, begin, end) {
    const T* g = static_cast<const T*>(a.grad) + row * a.width;
    const T* gate = static_cast<const T*>(a.gate) + row * a.gate_step;
    const T* up = static_cast<const T*>(a.up) + row * a.up_step;
    T* dgate = static_cast<T*>(a.dgate) + row * a.width;
    T* dup = static_cast<T*>(a.dup) + row * a.width;
    PTDP_EACH(j, a.width) {
      const float v = widen(gate[j]), grad = widen(g[j]), s = sigmoid(v);
      dup[j] = narrow<T>(grad * v * s);
      dgate[j] = narrow<T>(grad * widen(up[j]) * s * (1.0f + (1.0f - s) * v));
    }
  }
}

}  // namespace
}  // namespace ptdp
