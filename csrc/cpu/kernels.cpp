// The CPU's table of kernels, compiled once for each instruction set: PTDP_LANES, PTDP_LEVEL (baseline, avx2, avx512).
//
// Kernels take their arguments by value: what they write cannot change those, so they stay in registers.
#include "../api.h"
#include "activation.h"
#include "cross_entropy.h"
#include "dropout_add.h"
#include "multi_tensor.h"
#include "norm.h"
#include "rotary.h"
#include "softmax.h"

#define PTDP_JOIN_(a, b) a##b
#define PTDP_JOIN(a, b) PTDP_JOIN_(a, b)
#define PTDP_TEXT_(a) #a
#define PTDP_TEXT(a) PTDP_TEXT_(a)

namespace ptdp {
namespace {

#define PTDP_OF_DTYPE(kernel)                                                    \
  [](const auto& a, int64_t begin, int64_t end, void*) {                        \
    return a.dtype == Dtype::float32 ? kernel<float>(a, begin, end) : kernel<bf16>(a, begin, end); \
  }
#define PTDP_OF_ANY(kernel) [](const auto& a, int64_t begin, int64_t end, void*) { return kernel(a, begin, end); }

const Kernels kTable = {
    PTDP_TEXT(PTDP_LEVEL),
    PTDP_OF_DTYPE(softmax),
    PTDP_OF_DTYPE(softmax_backward),
    PTDP_OF_DTYPE(norm),
    PTDP_OF_DTYPE(norm_backward),
    PTDP_OF_DTYPE(bias_gelu),
    PTDP_OF_DTYPE(bias_gelu_backward),
    PTDP_OF_DTYPE(swiglu),
    PTDP_OF_DTYPE(swiglu_backward),
    PTDP_OF_DTYPE(dropout_add),
    PTDP_OF_DTYPE(dropout_add_backward),
    PTDP_OF_DTYPE(rotary),
    PTDP_OF_DTYPE(cross_entropy_stats),
    PTDP_OF_DTYPE(cross_entropy_gradient),
    PTDP_OF_ANY(sum_parts),
    PTDP_OF_ANY(adam),
    PTDP_OF_ANY(check_finite),
    PTDP_OF_ANY(scale),
    PTDP_OF_ANY(squares),
};

}  // namespace
}  // namespace ptdp

extern "C" const ptdp::Kernels* PTDP_JOIN(ptdp_cpu_, PTDP_LEVEL)() { return &ptdp::kTable; }
