// PolyNorm of one strip of rows; R is the order. Reference: kernels/reference.py.
//
//   y  = sum_i a_i z_i + b,   z_i = u^i / m_i,   m_i = sqrt(mean(u^(2i)) + eps / s^(2i)),   u = x / s
//   dx = sum_i i a_i u^(i-1) / (m_i s) * (g - z_i mean(g z_i)),   da_i = sum g z_i,   db = sum g
//
// s is a power of two near the row's root mean square times n^(1/4), at least 1, so that no power of
// u overflows and the division is exact. It is read off m_1 s, the first of the saved statistics.
#pragma once

#include <cmath>
#include <limits>

#include "strips.h"

namespace polyvision {

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

template <class T, int R, bool Across>
struct Norm {
  using C = Arithmetic<T>;
  using V = Vec<C>;
  using Strips = Rows<T, Across>;
  static constexpr int64_t rows = Strips::lanes;

  // What the rows are divided by: u = x inv, z_i = u^(i+1) / root[i]; first = root[0] / inv.
  struct Scales {
    C inv[rows], first[rows], root[R][rows];
  };

  static void forward(const Strips& s) {
    const Scales scales = measure(s);
    for (int64_t r = 0; s.stats && r < s.count; ++r) {
      s.stats[r * R] = scales.first[r];
      for (int i = 1; i < R; ++i) s.stats[r * R + i] = scales.root[i][r];
    }
    evaluate(s, scales, s.mul, s.out);
  }

  static void backward(const Strips& s) {
    const Scales scales = restore(s);
    const V inv = spread<Across>(scales.inv);
    if (s.dmul) evaluate(s, scales, s.g.grad, s.dmul);

    double total[R + 1][rows];
    sum_rows<C, Across, R + 1>(s.n, total, [x = s.x, g = s.g, inv](int64_t j, auto part, V* sum) {
      const V u = x(j, part) * inv;
      V term = g(j, part);
      sum[0] += term;
      for (int i = 1; i <= R; ++i) {
        term *= u;
        sum[i] += term;
      }
    });

    C a[R][rows], b[R][rows];
    for (int64_t r = 0; r < rows; ++r) {
      for (int i = 0; i < R; ++i) {
        const C over_root = 1 / scales.root[i][r];
        const double correlation = total[i + 1][r] * over_root;  // sum of g z
        if (r < s.count) s.partial[r][i] += correlation;
        a[i][r] = C(i + 1) * s.weight[r][i] * over_root * scales.inv[r];
        b[i][r] = a[i][r] * over_root * C(correlation * s.over_n);
      }
      if (r < s.count) s.partial[r][R] += total[0][r];
    }
    if (s.out) combine(s, inv, a, b);
  }

 private:
  static Scales restore(const Strips& s) {
    Scales scales;
    for (int64_t r = 0; r < rows; ++r) {
      const C* stats = s.stats + std::min(r, s.count - 1) * R;
      scales.first[r] = stats[0];
      scales.inv[r] = inverse_scale(stats[0], s.shift);
      scales.root[0][r] = stats[0] * scales.inv[r];
      for (int i = 1; i < R; ++i) scales.root[i][r] = stats[i];
    }
    return scales;
  }

  // total[i] = sum of u^(2i+2), i < K.
  template <int K>
  static void power_sums(const Strips& s, V inv, double (*total)[rows]) {
    sum_rows<C, Across, K>(s.n, total, [x = s.x, inv](int64_t j, auto part, V* sum) {
      const V u = x(j, part) * inv;
      const V square = u * u;
      V power = square;
      sum[0] += power;
      for (int i = 1; i < K; ++i) {
        power *= square;
        sum[i] += power;
      }
    });
  }

  static Scales measure(const Strips& s) {
    Scales scales;
    double total[R][rows];
    bool again[rows], any = false;
    power_sums<R>(s, broadcast(C(1)), total);
    for (int64_t r = 0; r < rows; ++r) {
      // Powers that underflow are nothing beside eps. One that overflows, or a nan, fails the test.
      again[r] = !(total[R - 1][r] < std::numeric_limits<C>::max() / 4);
      any |= again[r];
      scales.first[r] = std::sqrt(C(total[0][r] * s.over_n + s.eps));
      scales.inv[r] = inverse_scale(scales.first[r], s.shift);
      C factor = 1;
      for (int i = 0; i < R; ++i)
        scales.root[i][r] = std::sqrt(C(total[i][r] * s.over_n + s.eps)) * (factor *= scales.inv[r]);
    }
    if (any) measure_large(s, total[0], again, scales);
    return scales;
  }

  // Rows that must be divided before their powers are taken.
  [[gnu::noinline]] static void measure_large(
      const Strips& s, const double* squares, const bool* again, Scales& scales) {
    C peak[rows];
    largest(s, peak);
    C shrink[rows];
    double total[R][rows];
    for (int64_t r = 0; r < rows; ++r) shrink[r] = inverse_scale(peak[r], 0);
    power_sums<1>(s, spread<Across>(shrink), total);
    for (int64_t r = 0; r < rows; ++r) {
      if (!again[r]) continue;
      const double rest = s.eps * shrink[r] * shrink[r];
      scales.first[r] = std::isnan(squares[r])  ? C(squares[r])
                        : std::isinf(peak[r]) ? peak[r]
                                              : std::sqrt(C(total[0][r] * s.over_n + rest)) / shrink[r];
      scales.inv[r] = inverse_scale(scales.first[r], s.shift);
    }
    power_sums<R>(s, spread<Across>(scales.inv), total);
    for (int64_t r = 0; r < rows; ++r) {
      if (!again[r]) continue;
      double rest = s.eps;
      for (int i = 0; i < R; ++i) {
        rest *= double(scales.inv[r]) * scales.inv[r];
        scales.root[i][r] = std::sqrt(C(total[i][r] * s.over_n + rest));
      }
      scales.root[0][r] = scales.first[r] * scales.inv[r];
    }
  }

  static void largest(const Strips& s, C* peak) {
    V top = {};
    for_vectors<C, Across>(s.n, [&, x = s.x](int64_t j, auto part) {
      const V v = x(j, part);
      const V size = v < 0 ? -v : v;
      top = size > top ? size : top;
    });
    C lane[kLanes<C>];
    store(lane, top);
    if constexpr (Across)
      std::copy(lane, lane + rows, peak);
    else
      peak[0] = *std::max_element(lane, lane + kLanes<C>);
  }

  // out = (sum_i a_i z_i + b) factor, by Horner's rule.
  static void evaluate(
      const Strips& s, const Scales& scales, Strip<const T> factor, Strip<T> out) {
    C c[R][rows];
    for (int i = 0; i < R; ++i)
      for (int64_t r = 0; r < rows; ++r) c[i][r] = s.weight[r][i] / scales.root[i][r];
    V coefficient[R];
    for (int i = 0; i < R; ++i) coefficient[i] = spread<Across>(c[i]);
    const V inv = spread<Across>(scales.inv), bias = spread<Across>(s.bias);
    for_vectors<C, Across>(s.n, [=, x = s.x](int64_t j, auto part) {
      fetch_next(x.x, j);
      const V u = x(j, part) * inv;
      V v = u * coefficient[R - 1];
      for (int i = R - 2; i >= 0; --i) v = (v + coefficient[i]) * u;
      v += bias;
      if (factor) v *= read(factor, j, part);
      write(out, j, v, part);
    });
  }

  // dx = g sum_i a[i] u^i - u sum_i b[i] u^(2i).
  static void combine(const Strips& s, V inv, const C (*a)[rows], const C (*b)[rows]) {
    V outer[R], inner[R];
    for (int i = 0; i < R; ++i) {
      outer[i] = spread<Across>(a[i]);
      inner[i] = spread<Across>(b[i]);
    }
    for_vectors<C, Across>(s.n, [=, x = s.x, g = s.g, out = s.out](int64_t j, auto part) {
      fetch_next(x.x, j);
      fetch_next(g.grad, j);
      const V v = x(j, part);
      const V u = v * inv;
      const V square = u * u;
      V p = outer[R - 1], q = inner[R - 1];
      for (int i = R - 2; i >= 0; --i) {
        p = p * u + outer[i];
        q = q * square + inner[i];
      }
      const V dx = g(j, part) * p - u * q;
      write(out, j, x.rectify ? (v <= 0 ? V{} : dx) : dx, part);
    });
  }
};

}  // namespace polyvision
