// SIMD values through the vector extensions of GCC and Clang, and the four storage types.
//
// Arithmetic runs on float (double for double); bf16 and fp16 are converted a row at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace polyvision {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#else
constexpr int kVectorBytes = 32;
#endif

template <class C>
struct Simd {
  typedef C Vector __attribute__((vector_size(kVectorBytes)));
  static constexpr int64_t lanes = kVectorBytes / sizeof(C);
};

template <class C>
using Vec = typename Simd<C>::Vector;

template <class C>
inline Vec<C> load(const C* p) {
  Vec<C> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// The first `count` lanes from memory, zero in the others.
template <class C>
inline Vec<C> load_head(const C* p, int64_t count) {
  Vec<C> v = {};
  std::memcpy(&v, p, count * sizeof(C));
  return v;
}

template <class C>
inline void store(C* p, Vec<C> v) {
  std::memcpy(p, &v, sizeof(v));
}

template <class C>
inline void store_head(C* p, Vec<C> v, int64_t count) {
  std::memcpy(p, &v, count * sizeof(C));
}

// Pairwise sum of the lanes.
template <class C>
inline C lane_sum(Vec<C> v) {
  C lane[Simd<C>::lanes];
  std::memcpy(lane, &v, sizeof(v));
  for (int64_t half = Simd<C>::lanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) lane[l] += lane[l + half];
  return lane[0];
}

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float widen(float v) { return v; }
inline double widen(double v) { return v; }
inline float widen(BFloat16 v) {
  uint32_t bits = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}
#if defined(__F16C__)
inline float widen(Half v) { return _cvtsh_ss(v.bits); }
#else
inline float widen(Half v) {
  _Float16 h;
  std::memcpy(&h, &v, sizeof(h));
  return float(h);
}
#endif

inline void narrow(float v, float* out) { *out = v; }
inline void narrow(double v, double* out) { *out = v; }
// Round to nearest even; a nan stays a nan.
inline void narrow(float v, BFloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
#if defined(__F16C__)
inline void narrow(float v, Half* out) { out->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }
#else
inline void narrow(float v, Half* out) {
  const _Float16 h = _Float16(v);
  std::memcpy(out, &h, sizeof(h));
}
#endif

template <class T, class C>
inline void widen_row(const T* src, C* dst, int64_t n) {
  for (int64_t j = 0; j < n; ++j) dst[j] = widen(src[j]);
}

template <class T, class C>
inline void narrow_row(const C* src, T* dst, int64_t n) {
  for (int64_t j = 0; j < n; ++j) narrow(src[j], dst + j);
}

#if defined(__F16C__)
// Eight at a time; compilers do not find this by themselves.
inline void widen_row(const Half* src, float* dst, int64_t n) {
  int64_t j = 0;
  for (; j + 8 <= n; j += 8)
    _mm256_storeu_ps(dst + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(src + j))));
  for (; j < n; ++j) dst[j] = widen(src[j]);
}

inline void narrow_row(const float* src, Half* dst, int64_t n) {
  int64_t j = 0;
  for (; j + 8 <= n; j += 8)
    _mm_storeu_si128((__m128i*)(dst + j),
                     _mm256_cvtps_ph(_mm256_loadu_ps(src + j), _MM_FROUND_TO_NEAREST_INT));
  for (; j < n; ++j) narrow(src[j], dst + j);
}
#endif

template <class C, int S, int... L>
inline void exchange(Vec<C>& a, Vec<C>& b, std::integer_sequence<int, L...>) {
  constexpr int lanes = sizeof...(L);
  const Vec<C> x = a, y = b;
#if defined(__clang__)
  a = __builtin_shufflevector(x, y, ((L & S) ? lanes + L - S : L)...);
  b = __builtin_shufflevector(x, y, ((L & S) ? lanes + L : L + S)...);
#else
  using Mask = decltype(x <= y);
  a = __builtin_shuffle(x, y, Mask{((L & S) ? lanes + L - S : L)...});
  b = __builtin_shuffle(x, y, Mask{((L & S) ? lanes + L : L + S)...});
#endif
}

// Transpose a square of lanes x lanes, swapping blocks of S x S, then smaller ones (Eklundh 1972).
template <class C, int S = Simd<C>::lanes / 2>
inline void transpose(Vec<C>* rows) {
  for (int64_t i = 0; i < Simd<C>::lanes; ++i)
    if (!(i & S))
      exchange<C, S>(rows[i], rows[i + S], std::make_integer_sequence<int, Simd<C>::lanes>{});
  if constexpr (S > 1) transpose<C, S / 2>(rows);
}

// One vector from storage type T, or the first lanes of one.
template <class C, class T>
inline Vec<C> load_as(const T* p, int64_t count) {
  C wide[Simd<C>::lanes] = {};
  if (count >= Simd<C>::lanes)
    widen_row(p, wide, Simd<C>::lanes);
  else
    widen_row(p, wide, count);
  return load(wide);
}

template <class C, class T>
inline void store_as(T* p, Vec<C> v, int64_t count) {
  C wide[Simd<C>::lanes];
  store(wide, v);
  if (count >= Simd<C>::lanes)
    narrow_row(wide, p, Simd<C>::lanes);
  else
    narrow_row(wide, p, count);
}

}  // namespace polyvision
