// Vectors of floats in the compiler's own vector types, so that one source serves every instruction set. Only the
// conversions between 16 and 32 bits, which the compiler does poorly, are intrinsics where there are any.
// PTDP_LANES is the number of floats in a register.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
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
template <class N>
inline void store(bf16* p, V v, N n) {
  const U u = bits_as<U>(v);
  const U rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const U chosen = v == v ? rounded : U{} + 0x7fc0;
  const H h = to_16_bits(chosen);
  std::memcpy(p, &h, 2 * static_cast<size_t>(static_cast<int64_t>(n)));
}

// Calls f(j, n) for each vector of a row: n elements from j on.
template <class F>
inline void each(int64_t width, F f) {
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) f(j, Whole{});
  if (j < width) f(j, width - j);
}

inline V first_lanes(V v, int64_t n, float others) {
  for (int64_t i = n; i < kLanes; ++i) v[i] = others;
  return v;
}
inline V larger(V a, V b) { return a > b ? a : b; }
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

// exp to about one unit in the last place; 0 below exp(-87.33), inf above exp(88.37). The polynomial is Cephes' expf.
inline V exp(V x) {
  const V shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which stands in the lowest bits
  const V shifted = x * 1.44269504f + shift;
  const V n = shifted - shift;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  V y = bits_as<V>(bits_as<I>(p) + (bits_as<I>(shifted) << 23));
  y = x < -87.33f ? V{} : y;
  y = x > 88.37f ? all(kInfinity) : y;
  return x == x ? y : x;
}

inline V sqrt(V x) {
  V y;
  for (int64_t i = 0; i < kLanes; ++i) y[i] = __builtin_sqrtf(x[i]);
  return y;
}

}  // namespace
}  // namespace ptdp
