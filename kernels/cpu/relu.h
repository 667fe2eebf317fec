// PolyReLU and PolyPReLU of one strip of rows; R is the order. Reference: kernels/reference.py.
//
//   y = sum_i a_i p^i + b,   p = x where x > 0, slope x elsewhere
#pragma once

#include "strips.h"

namespace polyvision {

template <class T, int R, bool Across>
struct Relu {
  using C = Arithmetic<T>;
  using V = Vec<C>;
  using Strips = Rows<T, Across>;
  static constexpr int64_t rows = Strips::lanes;

  static void forward(const Strips& s) { evaluate(s, s.mul, s.out); }

  static void backward(const Strips& s) {
    if (s.dmul) evaluate(s, s.g.grad, s.dmul);
    V weight[R];
    load_weight(s, weight);
    double total[R + 2][rows];
    const auto add = [=, base = s.x, gradient = s.g, slopes = s.slopes, out = s.out,
                      slope_sums = s.slope_sums](int64_t j, auto part, V* sum) {
      const V x = base(j, part), g = gradient(j, part);
      const V slope = slopes ? read(slopes, j, Whole{}) : V{};
      const V u = x <= 0 ? negative(slopes, x, slope) : x;
      V term = g;
      sum[R] += term;
      for (int i = 0; i < R; ++i) {
        term *= u;
        sum[i] += term;
      }
      V p = weight[R - 1] * C(R);
      for (int i = R - 2; i >= 0; --i) p = p * u + weight[i] * C(i + 1);
      const V du = g * p;
      if (slopes) {
        const V of_slope = x <= 0 ? du * x : V{};
        sum[R + 1] += of_slope;
        if (slope_sums) add_slopes(slope_sums, j, of_slope);
      }
      if (out) write(out, j, x <= 0 ? negative(slopes, du, slope) : du, part);
    };
    sum_rows<C, Across, R + 2>(s.n, total, add);
    for (int64_t r = 0; r < s.count; ++r)
      for (int i = 0; i < R + 2; ++i) s.partial[r][i] += total[i][r];
  }

 private:
  static void load_weight(const Strips& s, V* weight) {
    for (int i = 0; i < R; ++i) {
      C of_row[rows];
      for (int64_t r = 0; r < rows; ++r) of_row[r] = s.weight[r][i];
      weight[i] = spread<Across>(of_row);
    }
  }

  // Plain ReLU must not meet 0 inf.
  static V negative(Strip<const C> slopes, V v, V slope) { return slopes ? v * slope : V{}; }

  static void add_slopes(double* sums, int64_t j, V terms) {
    if constexpr (Across)
      sums[j] += lane_sum<C>(terms);
    else
      for (int64_t l = 0; l < kLanes<C>; ++l) sums[j * kLanes<C> + l] += terms[l];
  }

  static void evaluate(const Strips& s, Strip<const T> factor, Strip<T> out) {
    V weight[R];
    load_weight(s, weight);
    const V bias = spread<Across>(s.bias);
    for_vectors<C, Across>(s.n, [=, base = s.x, slopes = s.slopes](int64_t j, auto part) {
      const V x = base(j, part);
      const V slope = slopes ? read(slopes, j, Whole{}) : V{};
      const V u = x <= 0 ? negative(slopes, x, slope) : x;
      V v = u * weight[R - 1];
      for (int i = R - 2; i >= 0; --i) v = (v + weight[i]) * u;
      v += bias;
      if (factor) v *= read(factor, j, part);
      write(out, j, v, part);
    });
  }
};

}  // namespace polyvision
