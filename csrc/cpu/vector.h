// Vectors of floats in the compiler's own vector types, so that one source serves every instruction set. What the compiler
// does poorly is intrinsics where there are any: conversions between 16 and 32 bits, minimum and maximum.
// PTDP_LANES is the number of floats in a register.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ptdp {
namespace {

constexpr int64_t kLanes = PTDP_LANES;
using V = float __attribute__((vector_size(4 * PTDP_LANES)));
using I = int32_t __attribute__((vector_size(4 * PTDP_LANES)));
using U = uint32_t __attribute__((vector_size(4 * PTDP_LANES)));
using H = uint16_t __attribute__((vector_size(2 * PTDP_LANES)));
using B = uint8_t __attribute__((vector_size(PTDP_LANES)));
using Whole = std::integral_constant<int64_t, kLanes>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLowest = std::numeric_limits<float>::lowest();

struct bf16 {
  uint16_t bits;
};

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline V all(float value) { return V{} + value; }

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return bits_as<float>(static_cast<uint32_t>(value.bits) << 16); }

// Rounds to nearest, ties to even; a NaN stays one.
template <class T>
inline T narrow(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    const uint32_t u = bits_as<uint32_t>(value);
    return {static_cast<uint16_t>(value == value ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : 0x7fc0)};
  }
}

#if defined(__AVX512BW__)
inline U to_32_bits(H h) { return bits_as<U>(_mm512_cvtepu16_epi32(bits_as<__m256i>(h))); }
inline H to_16_bits(U u) { return bits_as<H>(_mm512_cvtepi32_epi16(bits_as<__m512i>(u))); }
#elif defined(__AVX2__)
inline U to_32_bits(H h) { return bits_as<U>(_mm256_cvtepu16_epi32(bits_as<__m128i>(h))); }
inline H to_16_bits(U u) {
  const __m256i halves = _mm256_packus_epi32(bits_as<__m256i>(u), bits_as<__m256i>(u));
  return bits_as<H>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0b1000)));
}
#else
inline U to_32_bits(H h) { return __builtin_convertvector(h, U); }
inline H to_16_bits(U u) { return __builtin_convertvector(u, H); }
#endif

// The first n elements at p, the other lanes 0; n is `Whole` in the middle of a row.
template <class N>
inline V load(const float* p, N n) {
  V v{};
  std::memcpy(&v, p, 4 * static_cast<size_t>(static_cast<int64_t>(n)));
  return v;
}
template <class N>
inline V load(const bf16* p, N n) {
  H h{};
  std::memcpy(&h, p, 2 * static_cast<size_t>(static_cast<int64_t>(n)));
  return bits_as<V>(to_32_bits(h) << 16);
}
template <class N>
inline I load(const uint8_t* p, N n) {
  B b{};
  std::memcpy(&b, p, static_cast<size_t>(static_cast<int64_t>(n)));
  return __builtin_convertvector(b, I);
}
template <class N>
inline void store(float* p, V v, N n) {
  std::memcpy(p, &v, 4 * static_cast<size_t>(static_cast<int64_t>(n)));
}
// The upper halves of floats, rounded to nearest, ties to even; a NaN stays one.
inline U rounded(V v) {
  const U u = bits_as<U>(v);
  return v == v ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : U{} + 0x7fc0;
}
template <class N>
inline void store(bf16* p, V v, N n) {
  const H h = to_16_bits(rounded(v));
  std::memcpy(p, &h, 2 * static_cast<size_t>(static_cast<int64_t>(n)));
}

template <class T>
inline void store_two(T* p, V first, V second) {
  store(p, first, Whole{});
  store(p + kLanes, second, Whole{});
}
#if defined(__AVX2__) && !defined(__AVX512BW__)
inline void store_two(bf16* p, V first, V second) {  // packed in one go
  const __m256i halves = _mm256_packus_epi32(bits_as<__m256i>(rounded(first)), bits_as<__m256i>(rounded(second)));
  const __m256i in_order = _mm256_permute4x64_epi64(halves, 0b11011000);
  std::memcpy(p, &in_order, sizeof in_order);
}
#endif

// Calls f(j, n) for each vector of a row: n elements from j on.
template <class F>
inline void each(int64_t width, F f) {
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) f(j, Whole{});
  if (j < width) f(j, width - j);
}

// out[j...] = f(j, n) over a row.
template <class T, class F>
inline void fill(T* out, int64_t width, F f) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes) {
    const V first = f(j, Whole{}), second = f(j + kLanes, Whole{});
    store_two(out + j, first, second);
  }
  if (j + kLanes <= width) {
    store(out + j, f(j, Whole{}), Whole{});
    j += kLanes;
  }
  if (j < width) store(out + j, f(j, width - j), width - j);
}

inline V first_lanes(V v, int64_t n, float others) {
  for (int64_t i = n; i < kLanes; ++i) v[i] = others;
  return v;
}

// b where either is NaN
#if defined(__AVX512F__) && PTDP_LANES == 16
inline V larger(V a, V b) { return _mm512_max_ps(a, b); }
inline V smaller(V a, V b) { return _mm512_min_ps(a, b); }
#elif defined(__AVX__) && PTDP_LANES == 8
inline V larger(V a, V b) { return _mm256_max_ps(a, b); }
inline V smaller(V a, V b) { return _mm256_min_ps(a, b); }
#elif defined(__SSE2__) && PTDP_LANES == 4
inline V larger(V a, V b) { return _mm_max_ps(a, b); }
inline V smaller(V a, V b) { return _mm_min_ps(a, b); }
#else
inline V larger(V a, V b) { return a > b ? a : b; }
inline V smaller(V a, V b) { return a < b ? a : b; }
#endif

inline float lanes_sum(V v) {
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += v[i];
  return total;
}
inline float lanes_max(V v) {
  float top = v[0];
  for (int64_t i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

// The sum of f(j, n) over a row, in four accumulators so that additions need not wait for each other.
template <class F>
inline float sum(int64_t width, F f) {
  V s0{}, s1{}, s2{}, s3{};
  int64_t j = 0;
  for (; j + 4 * kLanes <= width; j += 4 * kLanes) {
    s0 += f(j, Whole{});
    s1 += f(j + kLanes, Whole{});
    s2 += f(j + 2 * kLanes, Whole{});
    s3 += f(j + 3 * kLanes, Whole{});
  }
  for (; j + kLanes <= width; j += kLanes) s0 += f(j, Whole{});
  if (j < width) s1 += first_lanes(f(j, width - j), width - j, 0.0f);
  return lanes_sum((s0 + s1) + (s2 + s3));
}

// The largest of f(j, n) over a row; passes over NaN, -inf for an empty row.
template <class F>
inline float max(int64_t width, F f) {
  V m0 = all(-kInfinity), m1 = m0;
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes) {
    m0 = larger(f(j, Whole{}), m0);
    m1 = larger(f(j + kLanes, Whole{}), m1);
  }
  for (; j + kLanes <= width; j += kLanes) m0 = larger(f(j, Whole{}), m0);
  if (j < width) m1 = larger(first_lanes(f(j, width - j), width - j, -kInfinity), m1);
  return lanes_max(larger(m0, m1));
}

// Adding it to a small float rounds that to an integer, which then stands in the lowest bits: 1.5 * 2^23.
constexpr float kToInteger = 12582912.0f;
constexpr float kLog2E = 1.4426950409f;

// 2^n, of n + kToInteger; n in [-126, 127].
inline V power_of_two(V shifted) { return bits_as<V>((bits_as<I>(shifted) << 23) + 0x3f800000); }

// 2^x of x in [-126, 126], as exactly as T needs: within 2e-7 for float32 and 3e-6 for 16 bits. The longer polynomial is
// Cephes' exp2f, the shorter a least-squares fit.
template <class T>
inline V exp2(V x) {
  const V shifted = x + kToInteger;
  const V r = x - (shifted - kToInteger);
  V p;
  if constexpr (std::is_same_v<T, float>) {
    p = all(1.535336188e-4f);
    p = p * r + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
  } else {
    p = all(9.582847e-03f);
    p = p * r + 5.5906434e-02f;
    p = p * r + 2.4024099e-01f;
    p = p * r + 6.9312419e-01f;
  }
  p = p * r + 1.0f;
  return p * power_of_two(shifted);
}

inline V clamp(V x) { return smaller(all(126.0f), larger(all(-126.0f), x)); }  // a NaN stays one

// exp for sums and probabilities, whose error grows with |x| as its value falls; 0 below exp(-87), at most exp(87).
template <class T = float>
inline V exp(V x) {
  return x < -87.0f ? V{} : exp2<T>(clamp(x * kLog2E));
}

// 1 / (1 + 2^x), at least 2^-126.
template <class T>
inline V logistic2(V x) {
  return 1.0f / (exp2<T>(clamp(x)) + 1.0f);
}

// A vector of a row's width, or where there is none one of equal numbers, so that no loop need ask.
struct OrElse {
  std::vector<float> spare;
  const float* data;
  OrElse(const float* p, int64_t width, float value) : spare(p ? 0 : width, value), data(p ? p : spare.data()) {}
};

// Where each part adds its sums over rows; a row that nobody reads where none are wanted.
struct SumsOrElse {
  std::vector<float> spare;
  float* partial;
  int64_t width;
  SumsOrElse(float* p, int64_t width) : spare(p ? 0 : width), partial(p), width(width) {}
  float* of(int64_t part) { return partial ? partial + part * width : spare.data(); }
};

inline V sqrt(V x) {
  V y;
  for (int64_t i = 0; i < kLanes; ++i) y[i] = __builtin_sqrtf(x[i]);
  return y;
}

}  // namespace
}  // namespace ptdp
