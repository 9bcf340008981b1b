#pragma once
#include <algorithm>

#include "vector.h"

namespace ptdp {
namespace {

// Calls f with a null pointer of the type that a dtype names; float16 has no kernel on a CPU and is refused before.
template <class F>
inline void by_dtype(Dtype dtype, F f) {
  if (dtype == Dtype::float32) {
    f(static_cast<float*>(nullptr));
  } else {
    f(static_cast<bf16*>(nullptr));
  }
}

inline void report(float* found_inf) {
  const float one = 1.0f;
  __atomic_store(found_inf, &one, __ATOMIC_RELAXED);  // several threads may
}

// Whether every number of v is finite: 0 * v is 0 for those, NaN for inf and NaN.
inline V nothing_of(V v) { return v * 0.0f; }

inline int sum_parts(const SumParts a, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = 64;  // at a time, so that memory is read in runs
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t columns = std::min(kColumns, end - first);
    double totals[kColumns] = {};
    for (int64_t part = 0; part < a.parts; ++part) {
      const float* partial = a.partial + part * a.width + first;
      for (int64_t j = 0; j < columns; ++j) totals[j] += partial[j];
    }
    std::copy(totals, totals + columns, a.out + first);
  }
  return 0;
}

template <class G>
void adam_chunk(const Adam a, const Chunk chunk) {
  float *p = static_cast<float*>(chunk.a), *m = static_cast<float*>(chunk.c), *v = static_cast<float*>(chunk.d);
  const G* g = static_cast<const G*>(chunk.b);
  bf16* copy = static_cast<bf16*>(chunk.e);
  each(chunk.size, [&](int64_t j, auto n) {
    V weight = load(p + j, n);
    const V grad = load(g + j, n) * a.grad_scale + weight * a.l2;
    const V first = load(m + j, n) * a.beta1 + grad * a.rest1;
    const V second = load(v + j, n) * a.beta2 + grad * grad * a.rest2;
    weight = weight * a.decay - first * a.step_size / (sqrt(second) * a.root2 + a.eps);
    store(p + j, weight, n);
    store(m + j, first, n);
    store(v + j, second, n);
    if (copy) store(copy + j, weight, n);
  });
}

inline int adam(const Adam a, int64_t begin, int64_t end) {
  if (*a.found_inf != 0) return 0;
  for (int64_t i = begin; i < end; ++i) {
    by_dtype(a.chunks[i].b_dtype, [&](auto* type) {
      adam_chunk<std::remove_pointer_t<decltype(type)>>(a, a.chunks[i]);
    });
  }
  return 0;
}

inline int check_finite(const CheckFinite a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    by_dtype(a.chunks[i].b_dtype, [&](auto* type) {
      const auto* g = static_cast<decltype(type)>(a.chunks[i].b);
      const float zero = sum(a.chunks[i].size, [&](int64_t j, auto n) { return nothing_of(load(g + j, n) * a.scale); });
      if (zero != 0) report(a.found_inf);
    });
  }
  return 0;
}

inline int scale(const Scale a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const Chunk& chunk = a.chunks[i];
    by_dtype(chunk.b_dtype, [&](auto* from) {
      by_dtype(chunk.a_dtype, [&](auto* to) {
        const auto* in = static_cast<decltype(from)>(chunk.b);
        auto* out = static_cast<decltype(to)>(chunk.a);
        const float zero = sum(chunk.size, [&](int64_t j, auto n) {
          const V v = load(in + j, n) * a.scale;
          store(out + j, v, n);
          return nothing_of(v);
        });
        if (zero != 0) report(a.found_inf);
      });
    });
  }
  return 0;
}

inline int squares(const Squares a, int64_t begin, int64_t end) {
  constexpr int64_t kRun = 4096;  // summed in float32, then in float64
  for (int64_t i = begin; i < end; ++i) {
    const Chunk& chunk = a.chunks[i];
    double total = 0;
    by_dtype(chunk.b_dtype, [&](auto* type) {
      const auto* x = static_cast<decltype(type)>(chunk.b);
      for (int64_t first = 0; first < chunk.size; first += kRun) {
        total += sum(std::min(kRun, chunk.size - first), [&](int64_t j, auto n) {
          const V v = load(x + first + j, n);
          return v * v;
        });
      }
    });
    a.out[i] = total;
  }
  return 0;
}

}  // namespace
}  // namespace ptdp
