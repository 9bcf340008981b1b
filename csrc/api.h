// What the kernels of every device share: the arguments of each, and the table of them that a device offers.
//
// A kernel works on the items [begin, end) of its arguments: rows, parts of rows, or chunks of tensors. On a CPU threads
// divide the items; on CUDA one call covers all of them, on `stream`. It returns 0 or the device's error code.
// No torch header is included here or by any kernel.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define PTDP_BOTH __host__ __device__
#else
#define PTDP_BOTH
#endif

namespace ptdp {

enum class Dtype : int { float32, float16, bfloat16 };

constexpr int kMaxDims = 8;        // leading dims of a broadcast or strided tensor
constexpr int64_t kChunk = 65536;  // elements of a tensor that one item of a multi-tensor kernel covers

// Where each row of a strided tensor begins, in elements.
struct Rows {
  int dims;
  int64_t size[kMaxDims], stride[kMaxDims];

  PTDP_BOTH int64_t at(int64_t row) const {
    int64_t offset = 0;
    for (int d = dims - 1; d >= 0; --d) {
      offset += row % size[d] * stride[d];
      row /= size[d];
    }
    return offset;
  }
};

// Rows in runs of `each`; the kernel adds what it sums over rows into partial[part * width].
struct Parts {
  int64_t rows, each;

  PTDP_BOTH int64_t first(int64_t part) const { return part * each; }
  PTDP_BOTH int64_t last(int64_t part) const { return first(part) + each < rows ? first(part) + each : rows; }
};

// Keys that a query of causal attention sees: the last query sees all.
PTDP_BOTH inline int64_t visible_keys(int64_t row, int64_t queries, int64_t keys, bool causal) {
  if (!causal) return keys;
  const int64_t seen = row % queries + 1 + keys - queries;
  return seen < 0 ? 0 : seen;
}

// y = softmax(scale * x) over visible keys; where mask is nonzero there is no probability. mask may be null.
struct Softmax {
  Dtype dtype;
  const void* x;
  const uint8_t* mask;
  Rows mask_rows;
  int64_t mask_step;  // 1, or 0: one mask a row
  void* y;
  float scale;
  int64_t queries, keys;
  bool causal;
};

struct SoftmaxBackward {
  Dtype dtype;
  const void *grad, *y;
  void* dx;
  float scale;
  int64_t queries, keys;
  bool causal;
};

// y = (x - mean) * rstd * weight + bias; mean counts as 0 unless `centers`. weight and bias may be null.
struct Norm {
  Dtype dtype;
  const void* x;
  const float *weight, *bias;
  void* y;
  float *mean, *rstd;
  float eps;
  int64_t width;
  bool centers;
};

// `saved` is x, or y where saved_is_output. dweight and dbias: [parts, width], or null.
struct NormBackward {
  Dtype dtype;
  const void *grad, *saved;
  const float *weight, *bias, *mean, *rstd;
  void* dx;
  float *dweight, *dbias;
  int64_t width;
  Parts parts;
  float eps;
  bool centers, saved_is_output;
};

// y = gelu(x + bias), by tanh. bias may be null.
struct BiasGelu {
  Dtype dtype;
  const void* x;
  const float* bias;
  void* y;
  int64_t width;
};

struct BiasGeluBackward {
  Dtype dtype;
  const void *grad, *x;
  const float* bias;
  void* dx;
  float* dbias;
  int64_t width;
  Parts parts;
};

// y = silu(gate) * up; rows of gate and up are `step` elements apart.
struct SwiGlu {
  Dtype dtype;
  const void *gate, *up;
  int64_t gate_step, up_step;
  void* y;
  int64_t width;
};

struct SwiGluBackward {
  Dtype dtype;
  const void *grad, *gate, *up;
  int64_t gate_step, up_step;
  void *dgate, *dup;
  int64_t width;
};

// y = residual + keep * (x + bias) / (1 - p), keep drawn from *seed and the element's index. bias may be null.
struct DropoutAdd {
  Dtype dtype;
  const void *x, *residual;
  const float* bias;
  const int64_t* seed;
  void* y;
  float p;
  int64_t width;
};

struct DropoutAddBackward {
  Dtype dtype;
  const void* grad;
  const int64_t* seed;
  void* dx;
  float* dbias;
  float p;
  int64_t width;
  Parts parts;
};

// Turns the pairs (x[j], x[j + half]) by the angles; what lies beyond 2 * half is copied. y is contiguous.
struct Rotary {
  Dtype dtype;
  const void* x;
  const float *cos, *sin;
  Rows x_rows, cos_rows, sin_rows;
  void* y;
  int64_t width, half;
  bool inverse;
};

// Of each row: the largest logit, the sum of exp(logit - largest), and the sum of (logit - largest).
struct CrossEntropyStats {
  Dtype dtype;
  const void* logits;
  float *peak, *sum_exp, *sum_shifted;
  int64_t width;
};

// dx = scale * (exp(logit - normalizer) - uniform - hit at the target); target < 0: none. Zero where scale is.
struct CrossEntropyGradient {
  Dtype dtype;
  const void* logits;
  const int64_t* target;
  const float *normalizer, *scale;
  void* dx;
  float uniform, hit;
  int64_t width;
};

// out = sums over parts, [width].
struct SumParts {
  const float* partial;
  float* out;
  int64_t parts, width;
};

// A piece of a tensor, at most kChunk elements, and of the tensors that go with it.
struct Chunk {
  void *a, *b, *c, *d, *e;
  Dtype a_dtype, b_dtype, e_dtype;
  int64_t size;
};

// a: float32 weights, b: gradients, c and d: moments, e: 16-bit copies of the weights or null.
// rest1 and rest2 are 1 - beta1 and 1 - beta2, which float32 would not give. Nothing is done if *found_inf is nonzero.
struct Adam {
  const Chunk* chunks;
  const float* found_inf;
  float step_size, beta1, beta2, rest1, rest2, eps, l2, decay, root2, grad_scale;
};

// Sets *found_inf to 1 if a number of b, times scale, is not finite.
struct CheckFinite {
  const Chunk* chunks;
  float* found_inf;
  float scale;
};

// a = scale * b, and *found_inf = 1 if a number is not finite.
struct Scale {
  const Chunk* chunks;
  float* found_inf;
  float scale;
};

// out[item] = sum of squares of b.
struct Squares {
  const Chunk* chunks;
  double* out;
};

template <class Args>
using Kernel = int (*)(const Args&, int64_t begin, int64_t end, void* stream);

struct Kernels {
  const char* name;
  Kernel<Softmax> softmax;
  Kernel<SoftmaxBackward> softmax_backward;
  Kernel<Norm> norm;
  Kernel<NormBackward> norm_backward;
  Kernel<BiasGelu> bias_gelu;
  Kernel<BiasGeluBackward> bias_gelu_backward;
  Kernel<SwiGlu> swiglu;
  Kernel<SwiGluBackward> swiglu_backward;
  Kernel<DropoutAdd> dropout_add;
  Kernel<DropoutAddBackward> dropout_add_backward;
  Kernel<Rotary> rotary;
  Kernel<CrossEntropyStats> cross_entropy_stats;
  Kernel<CrossEntropyGradient> cross_entropy_gradient;
  Kernel<SumParts> sum_parts;
  Kernel<Adam> adam;
  Kernel<CheckFinite> check_finite;
  Kernel<Scale> scale;
  Kernel<Squares> squares;
};

// A number in [0, 2^32) from a seed and an index: the splitmix64 generator (Steele, Lea, Flood, OOPSLA 2014), upper half.
PTDP_BOTH inline uint32_t draw(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}

// Elements whose draw is below it are dropped.
PTDP_BOTH inline uint32_t drop_below(float p) { return static_cast<uint32_t>(static_cast<double>(p) * 4294967295.0); }

}  // namespace ptdp

extern "C" {
const ptdp::Kernels* ptdp_cpu_baseline();
const ptdp::Kernels* ptdp_cpu_avx2();
const ptdp::Kernels* ptdp_cpu_avx512();
const ptdp::Kernels* ptdp_cuda();
const char* ptdp_cuda_error(int code);
}
