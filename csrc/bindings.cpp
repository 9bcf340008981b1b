// The operations of torch.ops.ptdp: schemas, checks, and the way from tensors to the kernels' arguments.
//
// LibTorch's stable ABI only (TORCH_TARGET_VERSION): one library serves torch 2.11 and later, for CPUs and for CUDA.
// Every operation has one function for all devices. With PTDP_TESTED the CPU runs the table that a test hands over.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "api.h"

#ifndef PTDP_NAMESPACE
#define PTDP_NAMESPACE ptdp
#endif

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

// Lies in libtorch_cuda.so; weak, so null in a build of torch for CPUs, where the same library loads too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace ptdp {
namespace {

// -- devices ---------------------------------------------------------------------------------------------------------

#if defined(PTDP_TESTED)
constexpr bool kHasCuda = false, kHasThreads = false, kHasHalf = true;
const Kernels* tested = nullptr;
extern "C" __attribute__((visibility("default"))) void ptdp_test(const Kernels* kernels) { tested = kernels; }
const Kernels& cpu_kernels() { return *tested; }
#else
constexpr bool kHasThreads = true, kHasHalf = false;
#if defined(PTDP_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif
const Kernels& cpu_kernels() {
  static const Kernels* const best = [] {
#if defined(PTDP_AVX)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      return ptdp_cpu_avx512();
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return ptdp_cpu_avx2();
#endif
    return ptdp_cpu_baseline();
  }();
  return *best;
}
#endif

#if defined(PTDP_CUDA)
const Kernels& cuda_kernels() { return *ptdp_cuda(); }
std::string error_text(int code) { return ptdp_cuda_error(code); }
#else
const Kernels& cuda_kernels() { return cpu_kernels(); }  // never: kHasCuda is checked before
std::string error_text(int code) { return std::to_string(code); }
#endif

bool is_cpu(const Tensor& t) { return t.device().type() == DeviceType::CPU; }

// Runs a kernel over `items` items. cost: of an item, in elements, so that threads get enough to do.
template <class Args>
void run(const Tensor& like, int64_t items, int64_t cost, Kernel<Args> Kernels::* kernel, const Args& args) {
  if (items == 0) return;
  if (is_cpu(like)) {
    const Kernel<Args> run_items = cpu_kernels().*kernel;
    if (!kHasThreads) {
      const int code = run_items(args, 0, items, nullptr);
      STD_TORCH_CHECK(code == 0, "ptdp: a kernel failed: ", error_text(code));
      return;
    }
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(cost, 1));
    torch::stable::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) {
      run_items(args, begin, end, nullptr);
    });
    return;
  }
  STD_TORCH_CHECK(kHasCuda && aoti_torch_get_current_cuda_stream, "ptdp: no kernels for this device were built");
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
  const int code = (cuda_kernels().*kernel)(args, 0, items, stream);
  STD_TORCH_CHECK(code == 0, "ptdp: a kernel failed: ", error_text(code));
}

// -- tensors ---------------------------------------------------------------------------------------------------------

// None where there is no kernel for it.
std::optional<Dtype> maybe_dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Dtype::float32;
    case ScalarType::BFloat16:
      return Dtype::bfloat16;
    case ScalarType::Half:
      return kHasHalf || !is_cpu(t) ? std::optional(Dtype::float16) : std::nullopt;
    default:
      return std::nullopt;
  }
}

Dtype dtype_of(const Tensor& t) {
  const auto dtype = maybe_dtype_of(t);
  STD_TORCH_CHECK(dtype, "ptdp: kernels take float32, bfloat16, and on CUDA float16");
  return *dtype;
}

Tensor packed(const Tensor& t) { return torch::stable::contiguous(t); }
MaybeTensor packed(const MaybeTensor& t) { return t ? MaybeTensor(packed(*t)) : t; }

const void* in(const Tensor& t) { return t.const_data_ptr(); }
void* out(const Tensor& t) { return t.mutable_data_ptr(); }
float* out_floats(const Tensor& t) { return t.numel() ? static_cast<float*>(out(t)) : nullptr; }

// A contiguous float32 vector, or null.
const float* floats(const MaybeTensor& t, int64_t size, const char* name) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && t->is_contiguous() && t->numel() == size, "ptdp: ", name,
                  " must be ", size, " contiguous float32 numbers");
  return static_cast<const float*>(in(*t));
}

Tensor like(const Tensor& t) { return torch::stable::new_empty(t, t.sizes()); }
Tensor vector(const Tensor& t, int64_t size, ScalarType dtype = ScalarType::Float) {
  return torch::stable::new_empty(t, {size}, dtype);
}

int64_t width_of(const Tensor& t) {
  STD_TORCH_CHECK(t.dim() > 0, "ptdp: a tensor with at least one dim is needed");
  return t.size(t.dim() - 1);
}
int64_t rows_of(const Tensor& t) { return width_of(t) ? t.numel() / width_of(t) : 0; }

void check_alike(const Tensor& a, const Tensor& b, const char* what) {
  bool same = a.dim() == b.dim() && a.scalar_type() == b.scalar_type() && a.device() == b.device();
  for (int64_t d = 0; same && d < a.dim(); ++d) same = a.size(d) == b.size(d);
  STD_TORCH_CHECK(same, "ptdp: ", what, " must have one shape, dtype and device");
}

// Where rows of a tensor of any strides begin.
Rows rows_at(const Tensor& t) {
  STD_TORCH_CHECK(t.dim() - 1 <= kMaxDims, "ptdp: at most ", kMaxDims + 1, " dims");
  Rows rows{};
  rows.dims = static_cast<int>(t.dim() - 1);
  for (int d = 0; d < rows.dims; ++d) {
    rows.size[d] = t.size(d);
    rows.stride[d] = t.stride(d);
  }
  return rows;
}

// -- sums over rows --------------------------------------------------------------------------------------------------

// Rows in runs of at most 256, which float32 adds well enough; float64 adds the runs. How many there are depends on the
// number of rows only: results are the same for every number of threads.
struct Sums {
  Parts parts;
  int64_t count;
  Tensor partial;

  Sums(const Tensor& x, bool wanted) {
    const int64_t rows = rows_of(x), aim = is_cpu(x) ? 64 : 512;
    const int64_t each = std::clamp<int64_t>((rows + aim - 1) / aim, 32, 256);
    parts = {rows, each};
    count = (rows + each - 1) / each;
    partial = torch::stable::new_zeros(x, {wanted ? count * width_of(x) : 0}, ScalarType::Float);
  }

  Tensor total(int64_t width) const {
    if (partial.numel() == 0) return torch::stable::new_zeros(partial, {width});
    Tensor sum = vector(partial, width);
    const SumParts args{static_cast<const float*>(in(partial)), out_floats(sum), count, width};
    run(partial, width, count, &Kernels::sum_parts, args);
    return sum;
  }
};

// -- softmax ---------------------------------------------------------------------------------------------------------

Tensor softmax(const Tensor& x_, const MaybeTensor& mask_, double scale, bool causal) {
  const Tensor x = packed(x_);
  STD_TORCH_CHECK(x.dim() >= 2, "ptdp: softmax takes [..., queries, keys]");
  Softmax args{};
  Tensor mask = mask_ ? *mask_ : x;
  if (mask_) {
    bool fits = mask.scalar_type() == ScalarType::Bool && mask.dim() == x.dim();
    for (int64_t d = 0; fits && d < x.dim(); ++d) fits = mask.size(d) == x.size(d);
    STD_TORCH_CHECK(fits, "ptdp: the mask must be boolean and expanded to the scores' shape");
    if (mask.stride(mask.dim() - 1) > 1) mask = packed(mask);
    args.mask = static_cast<const uint8_t*>(in(mask));
    args.mask_rows = rows_at(mask);
    args.mask_step = mask.stride(mask.dim() - 1);
  }
  const Tensor y = like(x);
  args.dtype = dtype_of(x);
  args.x = in(x);
  args.y = out(y);
  args.scale = static_cast<float>(scale);
  args.queries = x.size(x.dim() - 2);
  args.keys = width_of(x);
  args.causal = causal;
  run(x, rows_of(x), args.keys, &Kernels::softmax, args);
  return y;
}

Tensor softmax_backward(const Tensor& grad_, const Tensor& y_, double scale, bool causal) {
  const Tensor grad = packed(grad_), y = packed(y_), dx = like(y);
  check_alike(grad, y, "the gradient and the output of softmax");
  const SoftmaxBackward args{dtype_of(y), in(grad), in(y), out(dx), static_cast<float>(scale), y.size(y.dim() - 2),
                             width_of(y), causal};
  run(y, rows_of(y), args.keys, &Kernels::softmax_backward, args);
  return dx;
}

// -- norms -----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> norm(const Tensor& x_, const MaybeTensor& weight_, const MaybeTensor& bias_,
                                        double eps, bool centers, [[maybe_unused]] bool saves_output) {
  const Tensor x = packed(x_), y = like(x), rstd = vector(x, rows_of(x)), mean = vector(x, centers ? rows_of(x) : 0);
  const MaybeTensor weight = packed(weight_), bias = packed(bias_);
  const int64_t width = width_of(x);
  const Norm args{dtype_of(x),     in(x),           floats(weight, width, "weight"), floats(bias, width, "bias"),
                  out(y),          out_floats(mean), out_floats(rstd),               static_cast<float>(eps),
                  width,           centers};
  run(x, rows_of(x), width, &Kernels::norm, args);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad_, const Tensor& saved_, const MaybeTensor& weight_,
                                                 const MaybeTensor& bias_, const Tensor& mean, const Tensor& rstd,
                                                 double eps, bool centers, bool saved_is_output) {
  const Tensor grad = packed(grad_), saved = packed(saved_), dx = like(saved);
  const MaybeTensor weight = packed(weight_), bias = packed(bias_);
  check_alike(grad, saved, "the gradient and what a norm saved");
  const int64_t width = width_of(saved), rows = rows_of(saved);
  const Sums dweight(saved, weight.has_value()), dbias(saved, bias.has_value());
  const NormBackward args{dtype_of(saved),
                          in(grad),
                          in(saved),
                          floats(weight, width, "weight"),
                          floats(bias, width, "bias"),
                          centers ? floats(mean, rows, "mean") : nullptr,
                          floats(rstd, rows, "rstd"),
                          out(dx),
                          out_floats(dweight.partial),
                          out_floats(dbias.partial),
                          width,
                          dweight.parts,
                          static_cast<float>(eps),
                          centers,
                          saved_is_output};
  run(saved, dweight.count, width * dweight.parts.each, &Kernels::norm_backward, args);
  return {dx, dweight.total(weight ? width : 0), dbias.total(bias ? width : 0)};
}

// -- activations -----------------------------------------------------------------------------------------------------

Tensor bias_gelu(const Tensor& x_, const MaybeTensor& bias_) {
  const Tensor x = packed(x_), y = like(x);
  const MaybeTensor bias = packed(bias_);
  const BiasGelu args{dtype_of(x), in(x), floats(bias, width_of(x), "bias"), out(y), width_of(x)};
  run(x, rows_of(x), args.width, &Kernels::bias_gelu, args);
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad_, const Tensor& x_, const MaybeTensor& bias_) {
  const Tensor grad = packed(grad_), x = packed(x_), dx = like(x);
  const MaybeTensor bias = packed(bias_);
  check_alike(grad, x, "the gradient and the input of bias_gelu");
  const int64_t width = width_of(x);
  const Sums dbias(x, bias.has_value());
  const BiasGeluBackward args{dtype_of(x), in(grad), in(x), floats(bias, width, "bias"), out(dx),
                              out_floats(dbias.partial), width, dbias.parts};
  run(x, dbias.count, width * dbias.parts.each, &Kernels::bias_gelu_backward, args);
  return {dx, dbias.total(bias ? width : 0)};
}

// The tensor and the distance of its rows; copied unless all rows are equally far apart.
std::tuple<Tensor, int64_t> with_step(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  bool even = t.numel() > 0 && t.stride(last) == 1 && last > 0;
  for (int64_t d = 0; even && d + 1 < last; ++d) even = t.stride(d) == t.stride(d + 1) * t.size(d + 1);
  if (even) return {t, t.stride(last - 1)};
  return {packed(t), width_of(t)};
}

Tensor swiglu(const Tensor& gate_, const Tensor& up_) {
  check_alike(gate_, up_, "gate and up");
  const auto [gate, gate_step] = with_step(gate_);
  const auto [up, up_step] = with_step(up_);
  const Tensor y = like(gate);
  const SwiGlu args{dtype_of(gate), in(gate), in(up), gate_step, up_step, out(y), width_of(gate)};
  run(gate, rows_of(gate), args.width, &Kernels::swiglu, args);
  return y;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_, const Tensor& gate_, const Tensor& up_) {
  check_alike(grad_, gate_, "the gradient and the gate of swiglu");
  const Tensor grad = packed(grad_);
  const auto [gate, gate_step] = with_step(gate_);
  const auto [up, up_step] = with_step(up_);
  const Tensor dgate = like(gate), dup = like(up);
  const SwiGluBackward args{dtype_of(gate), in(grad), in(gate), in(up), gate_step, up_step,
                            out(dgate),     out(dup), width_of(gate)};
  run(gate, rows_of(gate), args.width, &Kernels::swiglu_backward, args);
  return {dgate, dup};
}

// -- dropout and residual --------------------------------------------------------------------------------------------

const int64_t* seed_of(const Tensor& seed) {
  STD_TORCH_CHECK(seed.scalar_type() == ScalarType::Long && seed.numel() == 1, "ptdp: seed must be one int64");
  return static_cast<const int64_t*>(in(seed));
}

Tensor dropout_add(const Tensor& x_, const MaybeTensor& bias_, const Tensor& residual_, const Tensor& seed, double p) {
  const Tensor x = packed(x_), residual = packed(residual_), y = like(x);
  const MaybeTensor bias = packed(bias_);
  check_alike(x, residual, "the input and the residual");
  const DropoutAdd args{dtype_of(x), in(x), in(residual), floats(bias, width_of(x), "bias"), seed_of(seed), out(y),
                        static_cast<float>(p), width_of(x)};
  run(x, rows_of(x), args.width, &Kernels::dropout_add, args);
  return y;
}

std::tuple<Tensor, Tensor> dropout_add_backward(const Tensor& grad_, const Tensor& seed, double p, bool has_bias) {
  const Tensor grad = packed(grad_), dx = like(grad);
  const int64_t width = width_of(grad);
  const Sums dbias(grad, has_bias);
  const DropoutAddBackward args{dtype_of(grad), in(grad), seed_of(seed), out(dx), out_floats(dbias.partial),
                                static_cast<float>(p), width, dbias.parts};
  run(grad, dbias.count, width * dbias.parts.each, &Kernels::dropout_add_backward, args);
  return {dx, dbias.total(has_bias ? width : 0)};
}

// -- rotary embedding ------------------------------------------------------------------------------------------------

Tensor rotary(const Tensor& x_, const Tensor& cos_, const Tensor& sin_, bool inverse) {
  const int64_t last = x_.dim() - 1;
  STD_TORCH_CHECK(cos_.dim() == x_.dim() && sin_.dim() == x_.dim() && cos_.size(last) == sin_.size(last) &&
                      2 * cos_.size(last) <= x_.size(last),
                  "ptdp: cos and sin must be expanded to x's leading dims, with at most half of its width");
  STD_TORCH_CHECK(cos_.scalar_type() == ScalarType::Float && sin_.scalar_type() == ScalarType::Float,
                  "ptdp: cos and sin must be float32");
  const Tensor x = x_.stride(last) == 1 ? x_ : packed(x_);
  const Tensor cos = cos_.stride(last) == 1 ? cos_ : packed(cos_), sin = sin_.stride(last) == 1 ? sin_ : packed(sin_);
  const Tensor y = like(x);
  const Rotary args{dtype_of(x),
                    in(x),
                    static_cast<const float*>(in(cos)),
                    static_cast<const float*>(in(sin)),
                    rows_at(x),
                    rows_at(cos),
                    rows_at(sin),
                    out(y),
                    width_of(x),
                    width_of(cos),
                    inverse};
  run(x, rows_of(x), args.width, &Kernels::rotary, args);
  return y;
}

// -- cross-entropy ---------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> cross_entropy_stats(const Tensor& logits_) {
  const Tensor logits = packed(logits_);
  STD_TORCH_CHECK(logits.dim() == 2, "ptdp: logits are [rows, classes]");
  const int64_t rows = logits.size(0);
  const Tensor peak = vector(logits, rows), sum_exp = vector(logits, rows), sum_shifted = vector(logits, rows);
  const CrossEntropyStats args{dtype_of(logits), in(logits), out_floats(peak), out_floats(sum_exp),
                               out_floats(sum_shifted), logits.size(1)};
  run(logits, rows, args.width, &Kernels::cross_entropy_stats, args);
  return {peak, sum_exp, sum_shifted};
}

Tensor cross_entropy_gradient(const Tensor& logits_, const Tensor& target_, const Tensor& normalizer_,
                              const Tensor& scale_, double uniform, double hit) {
  const Tensor logits = packed(logits_), target = packed(target_), dx = like(logits);
  const MaybeTensor normalizer = packed(normalizer_), scale = packed(scale_);
  STD_TORCH_CHECK(logits.dim() == 2, "ptdp: logits are [rows, classes]");
  const int64_t rows = logits.size(0);
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long && target.numel() == rows, "ptdp: one int64 target a row");
  const CrossEntropyGradient args{dtype_of(logits),
                                  in(logits),
                                  static_cast<const int64_t*>(in(target)),
                                  floats(normalizer, rows, "normalizer"),
                                  floats(scale, rows, "scale"),
                                  out(dx),
                                  static_cast<float>(uniform),
                                  static_cast<float>(hit),
                                  logits.size(1)};
  run(logits, rows, args.width, &Kernels::cross_entropy_gradient, args);
  return dx;
}

// -- lists of tensors ------------------------------------------------------------------------------------------------

// What the tensors of a list may be.
enum class Kind { any, float32, bits16 };

// A list of tensors that go with others, element by element; `writes` where the kernel changes them.
struct List {
  const Tensors* tensors;
  bool writes;
  Kind kind;
};

class Chunks {
 public:
  // Lists a to e of a chunk; one that is null or empty is left out.
  explicit Chunks(const std::vector<List>& lists) {
    const Tensors& first = *lists[1].tensors;
    for (const List& list : lists) {
      if (list.tensors && !list.tensors->empty() && list.tensors->size() != first.size()) fits_ = false;
    }
    if (first.empty() || !fits_) return;
    const auto device = first[0].device();
    chunks_.reserve(first.size());
    for (size_t i = 0; i < first.size(); ++i) {
      char* at[5] = {};
      int64_t bytes[5] = {};
      Dtype dtypes[5] = {};
      const int64_t size = first[i].numel();
      for (size_t k = 0; k < lists.size(); ++k) {
        if (!lists[k].tensors || lists[k].tensors->empty()) continue;
        const Tensor& t = (*lists[k].tensors)[i];
        const auto dtype = maybe_dtype_of(t);
        if (!dtype || !is_kind(*dtype, lists[k].kind) || !t.is_contiguous() || t.numel() != size ||
            t.device() != device) {
          fits_ = false;
          return;
        }
        dtypes[k] = *dtype;
        bytes[k] = *dtype == Dtype::float32 ? 4 : 2;
        at[k] = static_cast<char*>(lists[k].writes ? out(t) : const_cast<void*>(in(t)));
      }
      for (int64_t start = 0; start < size; start += kChunk) {
        void* p[5];
        for (int k = 0; k < 5; ++k) p[k] = at[k] ? at[k] + start * bytes[k] : nullptr;
        chunks_.push_back({p[0], p[1], p[2], p[3], p[4], dtypes[0], dtypes[1], dtypes[4],
                           std::min(kChunk, size - start)});
      }
    }
  }

  // Whether there is a kernel for the lists: equally long, of contiguous tensors on one device, as large as their
  // partners, of the kinds asked for.
  bool fit() const { return fits_; }
  void check() const {
    STD_TORCH_CHECK(fits_, "ptdp: tensors of lists must be contiguous, on one device, as large as their partners, and "
                           "float32, bfloat16, or on CUDA float16");
  }

  const Chunk* data() const { return chunks_.data(); }
  int64_t size() const { return static_cast<int64_t>(chunks_.size()); }
  int64_t cost() const { return chunks_.empty() ? 1 : chunks_[0].size; }

 private:
  static bool is_kind(Dtype dtype, Kind kind) {
    return kind == Kind::any || (dtype == Dtype::float32) == (kind == Kind::float32);
  }

  std::vector<Chunk> chunks_;
  bool fits_ = true;
};

float* flag(const Tensor& found_inf) {
  STD_TORCH_CHECK(found_inf.scalar_type() == ScalarType::Float && found_inf.numel() == 1,
                  "ptdp: found_inf must be one float32");
  return static_cast<float*>(out(found_inf));
}

// Whether the tensors fit the kernels; if they don't, nothing is done.
Tensor adam_(Tensors weights, Tensors grads, Tensors first, Tensors second, Tensors copies, Tensor found_inf, double lr,
             double beta1, double beta2, double eps, double weight_decay, int64_t step, bool decoupled,
             bool corrects_bias, double grad_scale, bool checks) {
  const Chunks chunks({{&weights, true, Kind::float32}, {&grads, false, Kind::any}, {&first, true, Kind::float32},
                       {&second, true, Kind::float32}, {&copies, true, Kind::bits16}});
  const Tensor fit = torch::stable::full({}, chunks.fit(), ScalarType::Bool);
  if (!chunks.fit() || chunks.size() == 0) return fit;
  float* found = flag(found_inf);
  const float scale = static_cast<float>(grad_scale);
  if (checks) run(grads[0], chunks.size(), chunks.cost(), &Kernels::check_finite, CheckFinite{chunks.data(), found, scale});
  const double correction1 = corrects_bias ? 1 - std::pow(beta1, static_cast<double>(step)) : 1;
  const double correction2 = corrects_bias ? 1 - std::pow(beta2, static_cast<double>(step)) : 1;
  const Adam args{chunks.data(),
                  found,
                  static_cast<float>(lr / correction1),
                  static_cast<float>(beta1),
                  static_cast<float>(beta2),
                  static_cast<float>(1 - beta1),
                  static_cast<float>(1 - beta2),
                  static_cast<float>(eps),
                  static_cast<float>(decoupled ? 0 : weight_decay),
                  static_cast<float>(decoupled ? 1 - lr * weight_decay : 1),
                  static_cast<float>(1 / std::sqrt(correction2)),
                  scale};
  run(grads[0], chunks.size(), chunks.cost(), &Kernels::adam, args);
  return fit;
}

void scale_(Tensors inputs, Tensors outputs, Tensor found_inf, double scale) {
  if (inputs.empty()) return;
  const Chunks chunks({{&outputs, true, Kind::any}, {&inputs, false, Kind::any}});
  chunks.check();
  run(inputs[0], chunks.size(), chunks.cost(), &Kernels::scale,
      Scale{chunks.data(), flag(found_inf), static_cast<float>(scale)});
}

Tensor squares(Tensors tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "ptdp: squares takes at least one tensor");
  const Chunks chunks({{nullptr, false, Kind::any}, {&tensors, false, Kind::any}});
  chunks.check();
  const Tensor sums = vector(tensors[0], chunks.size(), ScalarType::Double);
  run(tensors[0], chunks.size(), chunks.cost(), &Kernels::squares,
      Squares{chunks.data(), chunks.size() ? static_cast<double*>(out(sums)) : nullptr});
  return sums;
}

// Adds 1 to counters and returns what they are then; [0], and nothing is done, unless all are floats on the CPU.
Tensor count_(Tensors counters) {
  const auto fits = [](const Tensor& t) {
    return is_cpu(t) && t.numel() == 1 && (t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::Double);
  };
  const bool all_fit = std::all_of(counters.begin(), counters.end(), fits);
  const int64_t size = all_fit ? static_cast<int64_t>(counters.size()) : 0;
  const Tensor counts = torch::stable::empty({size}, ScalarType::Double);
  double* count = size ? static_cast<double*>(out(counts)) : nullptr;
  for (int64_t i = 0; i < size; ++i) {
    const Tensor& counter = counters[i];
    count[i] = counter.scalar_type() == ScalarType::Float ? ++*static_cast<float*>(out(counter))
                                                          : ++*static_cast<double*>(out(counter));
  }
  return counts;
}

// -- what was built --------------------------------------------------------------------------------------------------

std::string instruction_set() { return cpu_kernels().name; }
bool has_cuda() { return kHasCuda && aoti_torch_get_current_cuda_stream != nullptr; }

}  // namespace
}  // namespace ptdp

STABLE_TORCH_LIBRARY(PTDP_NAMESPACE, m) {
  m.def("softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor");
  m.def("softmax_backward(Tensor grad, Tensor y, float scale, bool causal) -> Tensor");
  m.def(
      "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centers, bool saves_output) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor grad, Tensor saved, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, float eps, "
      "bool centers, bool saved_is_output) -> (Tensor, Tensor, Tensor)");
  m.def("bias_gelu(Tensor x, Tensor? bias) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  m.def("dropout_add(Tensor x, Tensor? bias, Tensor residual, Tensor seed, float p) -> Tensor");
  m.def("dropout_add_backward(Tensor grad, Tensor seed, float p, bool has_bias) -> (Tensor, Tensor)");
  m.def("rotary(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor");
  m.def("cross_entropy_stats(Tensor logits) -> (Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_gradient(Tensor logits, Tensor target, Tensor normalizer, Tensor scale, float uniform, float hit) "
      "-> Tensor");
  m.def(
      "adam_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] copies, "
      "Tensor(e!) found_inf, float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
      "bool decoupled, bool corrects_bias, float grad_scale, bool checks) -> Tensor");
  m.def("scale_(Tensor[] inputs, Tensor(a!)[] outputs, Tensor(b!) found_inf, float scale) -> ()");
  m.def("squares(Tensor[] tensors) -> Tensor");
  m.def("count_(Tensor(a!)[] counters) -> Tensor");
  m.def("instruction_set() -> str");
  m.def("has_cuda() -> bool");
}

#define PTDP_IMPLEMENT(m)                                                              \
  m.impl("softmax", TORCH_BOX(&ptdp::softmax));                                        \
  m.impl("softmax_backward", TORCH_BOX(&ptdp::softmax_backward));                      \
  m.impl("norm", TORCH_BOX(&ptdp::norm));                                              \
  m.impl("norm_backward", TORCH_BOX(&ptdp::norm_backward));                            \
  m.impl("bias_gelu", TORCH_BOX(&ptdp::bias_gelu));                                    \
  m.impl("bias_gelu_backward", TORCH_BOX(&ptdp::bias_gelu_backward));                  \
  m.impl("swiglu", TORCH_BOX(&ptdp::swiglu));                                          \
  m.impl("swiglu_backward", TORCH_BOX(&ptdp::swiglu_backward));                        \
  m.impl("dropout_add", TORCH_BOX(&ptdp::dropout_add));                                \
  m.impl("dropout_add_backward", TORCH_BOX(&ptdp::dropout_add_backward));              \
  m.impl("rotary", TORCH_BOX(&ptdp::rotary));                                          \
  m.impl("cross_entropy_stats", TORCH_BOX(&ptdp::cross_entropy_stats));                \
  m.impl("cross_entropy_gradient", TORCH_BOX(&ptdp::cross_entropy_gradient));          \
  m.impl("adam_", TORCH_BOX(&ptdp::adam_));                                            \
  m.impl("scale_", TORCH_BOX(&ptdp::scale_));                                          \
  m.impl("squares", TORCH_BOX(&ptdp::squares))

STABLE_TORCH_LIBRARY_IMPL(PTDP_NAMESPACE, CPU, m) { PTDP_IMPLEMENT(m); }
#if defined(PTDP_CUDA)
STABLE_TORCH_LIBRARY_IMPL(PTDP_NAMESPACE, CUDA, m) { PTDP_IMPLEMENT(m); }
#endif
STABLE_TORCH_LIBRARY_IMPL(PTDP_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("count_", TORCH_BOX(&ptdp::count_));
  m.impl("instruction_set", TORCH_BOX(&ptdp::instruction_set));
  m.impl("has_cuda", TORCH_BOX(&ptdp::has_cuda));
}
