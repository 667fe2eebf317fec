// SIMD values through the vector extensions of GCC and Clang, and the four storage types.
//
// Arithmetic runs on float (double for double); bf16 and fp16 are converted in registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace polyvision {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#else
constexpr int kVectorBytes = 32;
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class C>
struct Simd {
  typedef C Vector __attribute__((vector_size(kVectorBytes)));
};
template <class C>
using Vec = typename Simd<C>::Vector;
template <class C>
constexpr int64_t kLanes = kVectorBytes / sizeof(C);

typedef uint32_t Bits32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Bits16 __attribute__((vector_size(kVectorBytes / 2)));

template <class C>
inline Vec<C> broadcast(C value) {
  return Vec<C>{} + value;
}

// One vector of the arithmetic type from memory of the storage type.
inline Vec<float> load(const float* p) {
  Vec<float> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline Vec<double> load(const double* p) {
  Vec<double> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, Vec<float> v) { std::memcpy(p, &v, sizeof(v)); }
inline void store(double* p, Vec<double> v) { std::memcpy(p, &v, sizeof(v)); }

inline Vec<float> load(const BFloat16* p) {
  Bits16 v;
  std::memcpy(&v, p, sizeof(v));
  return (Vec<float>)(__builtin_convertvector(v, Bits32) << 16);
}

// Rounds to nearest even; a nan stays a nan.
inline void store(BFloat16* p, Vec<float> v) {
  const Bits32 bits = (Bits32)v;
  const Bits32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits32 number = (Bits32)(v == v);
  const Bits16 result = __builtin_convertvector((rounded & number) | (0x7fc0 & ~number), Bits16);
  std::memcpy(p, &result, sizeof(result));
}

#if defined(__AVX512F__)
inline Vec<float> load(const Half* p) {
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline void store(Half* p, Vec<float> v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
inline Vec<float> load(const Half* p) {
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline void store(Half* p, Vec<float> v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline Vec<float> load(const Half* p) {
  Vec<float> v;
  for (int64_t l = 0; l < kLanes<float>; ++l) {
    _Float16 h;
    std::memcpy(&h, p + l, sizeof(h));
    v[l] = float(h);
  }
  return v;
}
inline void store(Half* p, Vec<float> v) {
  for (int64_t l = 0; l < kLanes<float>; ++l) {
    const _Float16 h = _Float16(v[l]);
    std::memcpy(p + l, &h, sizeof(h));
  }
}
#endif

// The first `count` lanes from memory, zero in the others.
template <class T>
inline Vec<Arithmetic<T>> load_head(const T* p, int64_t count) {
  T head[kLanes<Arithmetic<T>>] = {};
  std::memcpy(head, p, count * sizeof(T));
  return load(head);
}

template <class T>
inline void store_head(T* p, Vec<Arithmetic<T>> v, int64_t count) {
  T head[kLanes<Arithmetic<T>>];
  store(head, v);
  std::memcpy(p, head, count * sizeof(T));
}

// Pairwise sum of the lanes.
template <class C, int Lanes = kLanes<C>, class V = Vec<C>>
inline C lane_sum(V v) {
  if constexpr (Lanes == 2) {
    return v[0] + v[1];
  } else {
    typedef C Half __attribute__((vector_size(sizeof(V) / 2)));
    Half low, high;
    std::memcpy(&low, &v, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
    return lane_sum<C, Lanes / 2, Half>(low + high);
  }
}

}  // namespace polyvision
