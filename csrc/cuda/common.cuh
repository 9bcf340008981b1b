// What every CUDA kernel uses. One block works on one row (or part of rows); threads share the row by strides.
// No header of torch; the CUDA runtime's only, or, under PTDP_EMULATED, a header that runs blocks on the CPU for tests.
#pragma once
#if !defined(PTDP_EMULATED)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define PTDP_SHARED(T, name, n) __shared__ T name[n]
#define PTDP_LAUNCH(kernel, grid, threads, stream, ...) \
  kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define PTDP_MAX_THREADS 1024
#endif
#include <cstdint>

#include "../api.h"

namespace ptdp {
namespace {

constexpr int kWarp = 32;
constexpr int64_t kMaxBlocks = 1 << 20;  // blocks walk over what is beyond

inline unsigned threads_for(int64_t width) {
  unsigned threads = kWarp;
  while (threads < PTDP_MAX_THREADS && threads < width) threads *= 2;
  return threads;
}
inline unsigned blocks_for(int64_t items) { return static_cast<unsigned>(items < kMaxBlocks ? items : kMaxBlocks); }

template <class T>
__device__ inline float widen(T value) {
  return static_cast<float>(value);
}
template <class T>
__device__ inline T narrow(float value) {
  return static_cast<T>(value);
}

__device__ inline float warp_sum(float v) {
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}
__device__ inline float warp_max(float v) {
  for (int step = kWarp / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

// The sum, or the largest, of v over the block, for all threads. shared: one float a warp. Every thread must call it.
template <bool kMax>
__device__ inline float block_reduce(float v, float* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  v = kMax ? warp_max(v) : warp_sum(v);
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  v = lane < warps ? shared[lane] : (kMax ? -INFINITY : 0.0f);
  v = kMax ? warp_max(v) : warp_sum(v);
  __syncthreads();  // before anyone writes into `shared` again
  return v;
}
__device__ inline float block_sum(float v, float* shared) { return block_reduce<false>(v, shared); }
__device__ inline float block_max(float v, float* shared) { return block_reduce<true>(v, shared); }

}  // namespace
}  // namespace ptdp

// for (j in the row) and for (row in the items), as every kernel divides them
#define PTDP_EACH(j, width) for (int64_t j = threadIdx.x; j < (width); j += blockDim.x)
#define PTDP_ITEMS(i, begin, end) for (int64_t i = (begin) + blockIdx.x; i < (end); i += gridDim.x)
