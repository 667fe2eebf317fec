// Strips: what the vector loops run over, and the sums they take.
//
// A strip is one row whose neighbouring elements fill the lanes ("along"), or one row in each lane
// ("across", for layouts such as NCHW in which neighbouring rows are neighbours in memory). The
// loops are the same: a load every `step` elements. Only what a sum over the elements of a row is
// differs, a number or a vector; it is held as an array of kRows numbers.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace polyvision {

constexpr int kMaxOrder = 8;
// A lane adds up this many terms in the row's own precision, then the sum goes on in double.
constexpr int64_t kChunk = 256;

template <class C, bool Across>
constexpr int64_t kRows = Across ? kLanes<C> : 1;

template <class T>
struct Strip {
  T* p = nullptr;
  int64_t step = 0;
  int64_t next = 0;  // from this strip to the one that will follow, where fetching ahead helps

  explicit operator bool() const { return p; }
};

// The lanes of the vector at hand that hold elements: all, or the first ones at the end of a row.
struct Whole {};
struct Head {
  int64_t count;
};

template <class T>
inline auto read(const Strip<T>& s, int64_t j, Whole) {
  return load(s.p + j * s.step);
}
template <class T>
inline auto read(const Strip<T>& s, int64_t j, Head head) {
  return load_head(s.p + j * s.step, head.count);
}
template <class T>
inline void write(const Strip<T>& s, int64_t j, Vec<Arithmetic<T>> v, Whole) {
  store(s.p + j * s.step, v);
}
template <class T>
inline void write(const Strip<T>& s, int64_t j, Vec<Arithmetic<T>> v, Head head) {
  store_head(s.p + j * s.step, v, head.count);
}

// While a strip is read for the second time, from the cache, the next one is fetched.
template <class T>
inline void fetch_next(const Strip<T>& s, int64_t j) {
  __builtin_prefetch(s.p + s.next + j * s.step);
}

// Calls body(vector number, Whole or Head) over the n elements of the rows of a strip.
template <class C, bool Across, class Body>
inline void for_vectors(int64_t n, Body body) {
  const int64_t whole = Across ? n : n / kLanes<C>;
#pragma GCC unroll 4
  for (int64_t j = 0; j < whole; ++j) body(j, Whole{});
  if (!Across && n % kLanes<C>) body(whole, Head{n % kLanes<C>});
}

template <bool Across, class C>
inline void add_rows(Vec<C> sum, double* total) {
  if constexpr (Across)
    for (int64_t r = 0; r < kLanes<C>; ++r) total[r] += sum[r];
  else
    total[0] += lane_sum<C>(sum);
}

// total[k][row] = what term(vector number, part, sum) adds to sum[k] over all vectors.
template <class C, bool Across, int K, class Term>
inline void sum_rows(int64_t n, double (*total)[kRows<C, Across>], Term term) {
  std::fill(total[0], total[0] + K * kRows<C, Across>, 0.0);
  const int64_t whole = Across ? n : n / kLanes<C>;
  for (int64_t start = 0, end = 0; end < whole || start == 0; start = end) {
    end = std::min(start + kChunk, whole);
    Vec<C> sum[K] = {};
#pragma GCC unroll 4
    for (int64_t j = start; j < end; ++j) term(j, Whole{}, sum);
    if (!Across && end == whole && n % kLanes<C>) term(whole, Head{n % kLanes<C>}, sum);
    for (int k = 0; k < K; ++k) add_rows<Across, C>(sum[k], total[k]);
    if (end == whole) break;
  }
}

// One number a row as a vector.
template <bool Across, class C>
inline Vec<C> spread(const C* values) {
  if constexpr (Across)
    return load(values);
  else
    return broadcast(values[0]);
}

// What the loops read. They take copies, since a write to memory might change a member.
template <class T>
struct Base {
  Strip<const T> x;
  bool rectify;  // max(x, 0) in place of x

  template <class Part>
  auto operator()(int64_t j, Part part) const {
    const auto v = read(x, j, part);
    return rectify ? (v <= 0 ? decltype(v){} : v) : v;
  }
};

template <class T>
struct Gradient {
  Strip<const T> grad, mul;

  template <class Part>
  auto operator()(int64_t j, Part part) const {
    const auto g = read(grad, j, part);
    return mul ? g * read(mul, j, part) : g;
  }
};

// The rows of one strip, with what belongs to them. Where a strip has fewer rows than lanes
// (count < kRows), the arrays repeat those of the last row and the memory has room for all lanes.
template <class T, bool Across>
struct Rows {
  using C = Arithmetic<T>;
  static constexpr int64_t lanes = kRows<C, Across>;

  int64_t n, count;
  double eps, over_n;  // over_n: 1 / n
  int shift;           // floor(log2(n) / 4), see norm.h
  Base<T> x;
  Gradient<T> g;
  Strip<const T> mul;
  Strip<T> out, dmul;     // out: y in the forward pass, dx in the backward pass
  Strip<const C> slopes;  // of PReLU
  const C* weight[lanes];
  C bias[lanes];
  C* stats;                // order numbers a row
  double* partial[lanes];  // the sums for the gradients of weight, bias and slope
  double* slope_sums;      // by element, when there is one slope for each
};

}  // namespace polyvision
