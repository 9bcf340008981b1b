// CUDA's table of kernels: how each is launched.
#include "activation.cuh"
#include "cross_entropy.cuh"
#include "dropout_add.cuh"
#include "multi_tensor.cuh"
#include "norm.cuh"
#include "rotary.cuh"
#include "softmax.cuh"

namespace ptdp {
namespace {

// One block an item. width: elements of an item's rows.
#define PTDP_ROWS(kernel, Args, width)                                                                               \
  [](const Args& a, int64_t begin, int64_t end, void* stream) {                                                      \
    const unsigned blocks = blocks_for(end - begin), threads = threads_for(a.width);                                 \
    if (a.dtype == Dtype::float32) {                                                                                 \
      PTDP_LAUNCH(kernel<float>, blocks, threads, stream, a, begin, end);                                            \
    } else if (a.dtype == Dtype::float16) {                                                                          \
      PTDP_LAUNCH(kernel<__half>, blocks, threads, stream, a, begin, end);                                           \
    } else {                                                                                                         \
      PTDP_LAUNCH(kernel<__nv_bfloat16>, blocks, threads, stream, a, begin, end);                                    \
    }                                                                                                                \
    return static_cast<int>(cudaGetLastError());                                                                     \
  }

// Calls launch(batch, first, count) for runs of chunks.
template <class Args, class Launch>
int in_batches(const Args& a, int64_t begin, int64_t end, Launch launch) {
  for (int64_t first = begin; first < end; first += kBatch) {
    const int64_t count = end - first < kBatch ? end - first : kBatch;
    Batch batch{};
    for (int64_t i = 0; i < count; ++i) batch.chunks[i] = a.chunks[first + i];
    launch(batch, first, static_cast<unsigned>(count));
  }
  return static_cast<int>(cudaGetLastError());
}

#define PTDP_CHUNKS(kernel, Args)                                                                    \
  [](const Args& a, int64_t begin, int64_t end, void* stream) {                                      \
    return in_batches(a, begin, end, [&](const Batch& batch, int64_t, unsigned count) {              \
      PTDP_LAUNCH(kernel, dim3(count, kSlices), kThreads, stream, a, batch);                         \
    });                                                                                              \
  }

int launch_sum_parts(const SumParts& a, int64_t begin, int64_t end, void* stream) {
  const unsigned threads = threads_for(end - begin);
  PTDP_LAUNCH(sum_parts, blocks_for((end - begin + threads - 1) / threads), threads, stream, a, begin, end);
  return static_cast<int>(cudaGetLastError());
}

int launch_squares(const Squares& a, int64_t begin, int64_t end, void* stream) {
  return in_batches(a, begin, end, [&](const Batch& batch, int64_t first, unsigned count) {
    PTDP_LAUNCH(squares, dim3(count), PTDP_MAX_THREADS, stream, a, first, batch);
  });
}

const Kernels kTable = {
    "cuda",
    PTDP_ROWS(softmax, Softmax, keys),
    PTDP_ROWS(softmax_backward, SoftmaxBackward, keys),
    PTDP_ROWS(norm, Norm, width),
    PTDP_ROWS(norm_backward, NormBackward, width),
    PTDP_ROWS(bias_gelu, BiasGelu, width),
    PTDP_ROWS(bias_gelu_backward, BiasGeluBackward, width),
    PTDP_ROWS(swiglu, SwiGlu, width),
    PTDP_ROWS(swiglu_backward, SwiGluBackward, width),
    PTDP_ROWS(dropout_add, DropoutAdd, width),
    PTDP_ROWS(dropout_add_backward, DropoutAddBackward, width),
    PTDP_ROWS(rotary, Rotary, half),
    PTDP_ROWS(cross_entropy_stats, CrossEntropyStats, width),
    PTDP_ROWS(cross_entropy_gradient, CrossEntropyGradient, width),
    launch_sum_parts,
    PTDP_CHUNKS(adam, Adam),
    PTDP_CHUNKS(check_finite, CheckFinite),
    PTDP_CHUNKS(scale, Scale),
    launch_squares,
};

}  // namespace
}  // namespace ptdp

extern "C" const ptdp::Kernels* ptdp_cuda() { return &ptdp::kTable; }
extern "C" const char* ptdp_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
