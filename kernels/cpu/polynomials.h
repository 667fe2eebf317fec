// The arithmetic on one row of float or double; R is the order. Reference: kernels/reference.py.
//
//   y  = sum_i a_i z_i + b,   z_i = u^i / m_i,   m_i = sqrt(mean(u^(2i)) + eps / s^(2i)),   u = x / s
//   dx = sum_i i a_i u^(i-1) / (m_i s) * (g - z_i mean(g z_i)),   da_i = sum g z_i,   db = sum g
//
// s is a power of two near the row's root mean square times D^(1/4), at least 1, so that no power of
// u overflows and the division is exact. It is read off m_1 s, the first of the saved statistics.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace polyvision {

constexpr int kMaxOrder = 8;
// Lanes add up this many elements in the row's own precision, then the sums go on in double.
constexpr int64_t kChunk = 4096;

// Call body(vector position, element count) over n elements; the count is the full width but at the end.
template <class C, class Body>
inline void for_vectors(int64_t n, Body body) {
  int64_t j = 0;
  for (; j + Simd<C>::lanes <= n; j += Simd<C>::lanes) body(j, std::true_type{});
  if (j < n) body(j, std::false_type{});
}

template <class C>
struct Reader {
  const C* p;
  int64_t n;
  Vec<C> operator()(int64_t j, std::true_type) const { return load(p + j); }
  Vec<C> operator()(int64_t j, std::false_type) const { return load_head(p + j, n - j); }
};

template <class C>
struct Writer {
  C* p;
  int64_t n;
  void operator()(int64_t j, Vec<C> v, std::true_type) const { store(p + j, v); }
  void operator()(int64_t j, Vec<C> v, std::false_type) const { store_head(p + j, v, n - j); }
};

// total[i] = sum of (x inv)^(2i+2).
template <class C, int R>
void power_sums(const C* x, int64_t n, C inv, double* total) {
  std::fill(total, total + R, 0.0);
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t length = std::min(kChunk, n - start);
    const Reader<C> read{x + start, length};
    Vec<C> sum[R] = {};
    for_vectors<C>(length, [&](int64_t j, auto full) {
      const Vec<C> u = read(j, full) * inv;
      const Vec<C> square = u * u;
      Vec<C> power = square;
      sum[0] += power;
      for (int i = 1; i < R; ++i) {
        power *= square;
        sum[i] += power;
      }
    });
    for (int i = 0; i < R; ++i) total[i] += lane_sum<C>(sum[i]);
  }
}

// total[i] = sum of g (x inv)^i, i = 0..R.
template <class C, int R>
void weighted_sums(const C* g, const C* x, int64_t n, C inv, double* total) {
  std::fill(total, total + R + 1, 0.0);
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t length = std::min(kChunk, n - start);
    const Reader<C> read_g{g + start, length}, read_x{x + start, length};
    Vec<C> sum[R + 1] = {};
    for_vectors<C>(length, [&](int64_t j, auto full) {
      const Vec<C> u = read_x(j, full) * inv;
      Vec<C> term = read_g(j, full);
      sum[0] += term;
      for (int i = 1; i <= R; ++i) {
        term *= u;
        sum[i] += term;
      }
    });
    for (int i = 0; i <= R; ++i) total[i] += lane_sum<C>(sum[i]);
  }
}

// The second pass over a long row reads the cache; meanwhile the next row is fetched. Short rows are
// left to the hardware, as is a row that was copied, where the address is harmless.
inline int64_t prefetch_distance(int64_t n) { return n >= 1024 ? n : 0; }

// y = sum_i c[i] (x inv)^(i+1) + bias, by Horner's rule.
template <class C, int R>
void evaluate(const C* x, int64_t n, C inv, const C* c, C bias, C* y) {
  const Reader<C> read{x, n};
  const Writer<C> write{y, n};
  const int64_t ahead = prefetch_distance(n);
  for_vectors<C>(n, [&](int64_t j, auto full) {
    __builtin_prefetch(x + ahead + j);
    const Vec<C> u = read(j, full) * inv;
    Vec<C> v = u * c[R - 1];
    for (int i = R - 2; i >= 0; --i) v = (v + c[i]) * u;
    write(j, v + bias, full);
  });
}

// dx = g sum_i a[i] u^i - u sum_i b[i] u^(2i).
template <class C, int R>
void combine(const C* g, const C* x, int64_t n, C inv, const C* a, const C* b, C* dx) {
  const Reader<C> read_g{g, n}, read_x{x, n};
  const Writer<C> write{dx, n};
  const int64_t ahead = prefetch_distance(n);
  for_vectors<C>(n, [&](int64_t j, auto full) {
    __builtin_prefetch(x + ahead + j);
    __builtin_prefetch(g + ahead + j);
    const Vec<C> u = read_x(j, full) * inv;
    const Vec<C> square = u * u;
    Vec<C> p = {}, q = {};
    p += a[R - 1];
    q += b[R - 1];
    for (int i = R - 2; i >= 0; --i) {
      p = p * u + a[i];
      q = q * square + b[i];
    }
    write(j, read_g(j, full) * p - u * q, full);
  });
}

// The power of two 2^-k with k = floor(log2 m) + shift, kept between 0 and the largest normal one.
inline float inverse_scale(float m, int shift) {
  uint32_t bits;
  std::memcpy(&bits, &m, sizeof(bits));
  const int k = std::clamp(int(bits >> 23 & 0xff) - 127 + shift, 0, 126);
  bits = uint32_t(127 - k) << 23;
  std::memcpy(&m, &bits, sizeof(bits));
  return m;
}
inline double inverse_scale(double m, int shift) {
  uint64_t bits;
  std::memcpy(&bits, &m, sizeof(bits));
  const int k = std::clamp(int(bits >> 52 & 0x7ff) - 1023 + shift, 0, 1022);
  bits = uint64_t(1023 - k) << 52;
  std::memcpy(&m, &bits, sizeof(bits));
  return m;
}

struct RowShape {
  int64_t n;
  double eps;
  int shift;  // floor(log2(n) / 4)
};

// What one row is divided by: u = x inv, z_i = u^(i+1) / root[i].
template <class C, int R>
struct Scales {
  C inv;
  C root[R];

  static Scales restore(const C* stats, const RowShape& shape) {
    Scales s;
    s.inv = inverse_scale(stats[0], shape.shift);
    s.root[0] = stats[0] * s.inv;
    std::copy(stats + 1, stats + R, s.root + 1);
    return s;
  }

  static Scales measure(const C* x, const RowShape& shape, C* stats) {
    double sum[R];
    Scales s;
    power_sums<C, R>(x, shape.n, C(1), sum);
    // Powers that underflow are nothing beside eps. One that overflows, or a nan, fails the test.
    if (sum[R - 1] < std::numeric_limits<C>::max() / 4) {
      stats[0] = std::sqrt(C(sum[0] / shape.n + shape.eps));
      s.inv = inverse_scale(stats[0], shape.shift);
      C factor = 1;
      for (int i = 0; i < R; ++i)
        s.root[i] = std::sqrt(C(sum[i] / shape.n + shape.eps)) * (factor *= s.inv);
    } else {
      stats[0] = root_mean_square(x, shape, sum[0]);
      s.inv = inverse_scale(stats[0], shape.shift);
      power_sums<C, R>(x, shape.n, s.inv, sum);
      double eps = shape.eps;
      for (int i = 0; i < R; ++i)
        s.root[i] = std::sqrt(C(sum[i] / shape.n + (eps *= double(s.inv) * s.inv)));
      s.root[0] = stats[0] * s.inv;
    }
    std::copy(s.root + 1, s.root + R, stats + 1);
    return s;
  }

 private:
  static C root_mean_square(const C* x, const RowShape& shape, double sum) {
    if (std::isnan(sum)) return C(sum);
    C peak = 0;
    for (int64_t j = 0; j < shape.n; ++j) peak = std::max(peak, std::abs(x[j]));
    if (std::isinf(peak)) return peak;
    const C inv = inverse_scale(peak, 0);
    power_sums<C, 1>(x, shape.n, inv, &sum);
    return std::sqrt(C(sum / shape.n + shape.eps * inv * inv)) / inv;
  }
};

template <class C, int R>
void norm_forward_row(const C* x, const RowShape& shape, const C* weight, C bias, C* stats, C* y) {
  const auto s = Scales<C, R>::measure(x, shape, stats);
  C c[R];
  for (int i = 0; i < R; ++i) c[i] = weight[i] / s.root[i];
  evaluate<C, R>(x, shape.n, s.inv, c, bias, y);
}

// The value before `mul`, needed again for the gradient of `mul`.
template <class C, int R>
void norm_value_row(
    const C* x, const RowShape& shape, const C* weight, C bias, const C* stats, C* y) {
  const auto s = Scales<C, R>::restore(stats, shape);
  C c[R];
  for (int i = 0; i < R; ++i) c[i] = weight[i] / s.root[i];
  evaluate<C, R>(x, shape.n, s.inv, c, bias, y);
}

// Adds to partial[0..R-1] the gradient of the weights, to partial[R] that of the bias.
template <class C, int R>
void norm_backward_row(const C* g, const C* x, const RowShape& shape, const C* weight,
                       const C* stats, C* dx, double* partial) {
  const auto s = Scales<C, R>::restore(stats, shape);
  double sum[R + 1];
  weighted_sums<C, R>(g, x, shape.n, s.inv, sum);
  partial[R] += sum[0];
  C a[R], b[R];
  for (int i = 0; i < R; ++i) {
    const double correlation = sum[i + 1] / s.root[i];  // sum of g z
    partial[i] += correlation;
    a[i] = C(i + 1) * weight[i] / s.root[i] * s.inv;
    b[i] = a[i] / s.root[i] * C(correlation / shape.n);
  }
  if (dx) combine<C, R>(g, x, shape.n, s.inv, a, b, dx);
}

// positive where v > 0, slope * negative elsewhere; plain ReLU (slope 0) must not meet 0 * inf.
template <class C>
inline Vec<C> select(Vec<C> v, Vec<C> positive, Vec<C> negative, C slope) {
  return v <= 0 ? (slope == 0 ? Vec<C>{} : negative * slope) : positive;
}

template <class C, int R>
void relu_forward_row(const C* x, int64_t n, const C* weight, C bias, C slope, C* y) {
  const Reader<C> read{x, n};
  const Writer<C> write{y, n};
  for_vectors<C>(n, [&](int64_t j, auto full) {
    const Vec<C> x_j = read(j, full);
    const Vec<C> u = select<C>(x_j, x_j, x_j, slope);
    Vec<C> v = u * weight[R - 1];
    for (int i = R - 2; i >= 0; --i) v = (v + weight[i]) * u;
    write(j, v + bias, full);
  });
}

// Adds to partial[0..R-1] the gradient of the weights, to [R] that of the bias, to [R+1] of the slope.
template <class C, int R>
void relu_backward_row(
    const C* g, const C* x, int64_t n, const C* weight, C slope, C* dx, double* partial) {
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t length = std::min(kChunk, n - start);
    const Reader<C> read_g{g + start, length}, read_x{x + start, length};
    const Writer<C> write{dx ? dx + start : nullptr, length};
    Vec<C> sum[R + 2] = {};
    for_vectors<C>(length, [&](int64_t j, auto full) {
      const Vec<C> v = read_x(j, full), grad = read_g(j, full);
      const Vec<C> u = select<C>(v, v, v, slope);
      Vec<C> term = grad;
      sum[R] += term;
      for (int i = 0; i < R; ++i) {
        term *= u;
        sum[i] += term;
      }
      Vec<C> p = {};
      p += weight[R - 1] * R;
      for (int i = R - 2; i >= 0; --i) p = p * u + weight[i] * (i + 1);
      const Vec<C> outer = grad * p;
      sum[R + 1] += v <= 0 ? outer * v : Vec<C>{};
      if (dx) write(j, select<C>(v, outer, outer, slope), full);
    });
    for (int i = 0; i < R + 2; ++i) partial[i] += lane_sum<C>(sum[i]);
  }
}

}  // namespace polyvision
