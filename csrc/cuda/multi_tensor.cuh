#pragma once
#include "common.cuh"

namespace ptdp {
namespace {

constexpr int kBatch = 40;   // chunks that fit into a kernel's 4 KiB of arguments
constexpr int kSlices = 8;   // blocks that share a chunk
constexpr int kThreads = PTDP_MAX_THREADS < 512 ? PTDP_MAX_THREADS : 512;

struct Batch {
  Chunk chunks[kBatch];
};

__device__ inline float read(const void* p, Dtype dtype, int64_t i) {
  if (dtype == Dtype::float32) return static_cast<const float*>(p)[i];
  if (dtype == Dtype::float16) return widen(static_cast<const __half*>(p)[i]);
  return widen(static_cast<const __nv_bfloat16*>(p)[i]);
}
__device__ inline void write(void* p, Dtype dtype, int64_t i, float value) {
  if (dtype == Dtype::float32) static_cast<float*>(p)[i] = value;
  if (dtype == Dtype::float16) static_cast<__half*>(p)[i] = narrow<__half>(value);
  if (dtype == Dtype::bfloat16) static_cast<__nv_bfloat16*>(p)[i] = narrow<__nv_bfloat16>(value);
}

#define PTDP_ELEMENTS(i, chunk) \
  for (int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < (chunk).size; i += blockDim.x * gridDim.y)

__global__ void sum_parts(const SumParts a, int64_t begin, int64_t end) {
  const int64_t first = begin + blockIdx.x * blockDim.x + threadIdx.x;
  for (int64_t j = first; j < end; j += static_cast<int64_t>(blockDim.x) * gridDim.x) {
    double total = 0;
    for (int64_t part = 0; part < a.parts; ++part) total += a.partial[part * a.width + j];
    a.out[j] = static_cast<float>(total);
  }
}

__global__ void adam(const Adam a, const Batch batch) {
  if (*a.found_inf != 0) return;
  const Chunk& chunk = batch.chunks[blockIdx.x];
  float *p = static_cast<float*>(chunk.a), *m = static_cast<float*>(chunk.c), *v = static_cast<float*>(chunk.d);
  PTDP_ELEMENTS(i, chunk) {
    float weight = p[i];
    const float grad = read(chunk.b, chunk.b_dtype, i) * a.grad_scale + weight * a.l2;
    const float first = m[i] * a.beta1 + grad * a.rest1;
    const float second = v[i] * a.beta2 + grad * grad * a.rest2;
    weight = weight * a.decay - first * a.step_size / (sqrtf(second) * a.root2 + a.eps);
    p[i] = weight;
    m[i] = first;
    v[i] = second;
    if (chunk.e) write(chunk.e, chunk.e_dtype, i, weight);
  }
}

__global__ void check_finite(const CheckFinite a, const Batch batch) {
  const Chunk& chunk = batch.chunks[blockIdx.x];
  PTDP_ELEMENTS(i, chunk) {
    if (read(chunk.b, chunk.b_dtype, i) * a.scale * 0.0f != 0.0f) *a.found_inf = 1.0f;  // NaN, of inf * 0 too
  }
}

__global__ void scale(const Scale a, const Batch batch) {
  const Chunk& chunk = batch.chunks[blockIdx.x];
  PTDP_ELEMENTS(i, chunk) {
    const float value = read(chunk.b, chunk.b_dtype, i) * a.scale;
    if (value * 0.0f != 0.0f) *a.found_inf = 1.0f;
    write(chunk.a, chunk.a_dtype, i, value);
  }
}

__global__ void squares(const Squares a, int64_t first, const Batch batch) {
  PTDP_SHARED(float, shared, 32);
  const Chunk& chunk = batch.chunks[blockIdx.x];
  float total = 0;
  PTDP_ELEMENTS(i, chunk) {
    const float value = read(chunk.b, chunk.b_dtype, i);
    total += value * value;
  }
  total = block_sum(total, shared);
  if (threadIdx.x == 0) a.out[first + blockIdx.x] = total;
}

}  // namespace
}  // namespace ptdp
