// PolyNorm and PolyReLU on CPU tensors of any layout, forward and backward: the C entry points.
//
// A tensor is seen as (outer, n, inner) with one stride each; a row is the n elements at one
// (outer, inner). Rows that lie apart in memory (NCHW) are loaded several at a time through a
// transposing copy, so that every cache line is read once. Reference: kernels/reference.py.
//
// The work is cut into blocks whose number does not depend on the threads; each block sums the
// gradients of the coefficients in double, and the blocks are added in order: results do not depend
// on the number of threads.

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "polynomials.h"

namespace polyvision {

enum Type : int64_t { kFloat, kDouble, kBFloat16, kHalf };

// Mirrored by launch.py, field by field; addresses are 0 where an operand is absent.
struct Operand {
  int64_t address, outer, element, inner;
};
struct Coefficients {
  int64_t address, type;
};
struct Call {
  Operand x, out, grad, mul, dmul;  // out: y in the forward pass, dx in the backward pass
  Coefficients weight, bias, slope, dweight, dbias, dslope;
  int64_t stats, group, groups, order, rectify, type, threads;
  int64_t outer, n, inner, last;  // last: the length of the rows of the last outer position
  double eps;

  int64_t length(int64_t o) const { return o == outer - 1 ? last : n; }
};

double get(const Coefficients& c, int64_t i) {
  switch (c.type) {
    case kFloat: return reinterpret_cast<const float*>(c.address)[i];
    case kDouble: return reinterpret_cast<const double*>(c.address)[i];
    case kBFloat16: return widen(reinterpret_cast<const BFloat16*>(c.address)[i]);
    default: return widen(reinterpret_cast<const Half*>(c.address)[i]);
  }
}

void set(const Coefficients& c, int64_t i, double value) {
  switch (c.type) {
    case kFloat: reinterpret_cast<float*>(c.address)[i] = float(value); break;
    case kDouble: reinterpret_cast<double*>(c.address)[i] = value; break;
    case kBFloat16: narrow(float(value), reinterpret_cast<BFloat16*>(c.address) + i); break;
    default: narrow(float(value), reinterpret_cast<Half*>(c.address) + i);
  }
}

// Up to `width` neighbouring rows (o, i), (o, i + 1), ... of one operand in the arithmetic type C.
template <class T, class C>
class Rows {
 public:
  // `copy`: the rows are changed after loading, so they never alias the tensor.
  Rows(const Operand& operand, int64_t n, int64_t width, bool copy = false)
      : a_(operand),
        pitch_((n + 31) / 16 * 16),
        direct_(std::is_same<T, C>::value && a_.element == 1 && !copy) {
    if (a_.address && !direct_) buffer_.reset(new C[pitch_ * width]);
  }

  explicit operator bool() const { return a_.address != 0; }

  C* row(int64_t o, int64_t i, int64_t k) const {
    return direct_ ? reinterpret_cast<C*>(at(o, i + k)) : buffer_.get() + k * pitch_;
  }

  void load(int64_t o, int64_t i, int64_t width, int64_t n) const {
    if (direct_) return;
    if (a_.element == 1) {
      for (int64_t k = 0; k < width; ++k) widen_row(at(o, i + k), row(o, i, k), n);
      return;
    }
    for (int64_t j = 0; j < n; j += kLanes)
      for (int64_t k = 0; k < width; k += kLanes) load_square(at(o, i + k), j, k, width - k, n - j);
  }

  void save(int64_t o, int64_t i, int64_t width, int64_t n) const {
    if (direct_) return;
    if (a_.element == 1) {
      for (int64_t k = 0; k < width; ++k) narrow_row(row(o, i, k), at(o, i + k), n);
      return;
    }
    for (int64_t j = 0; j < n; j += kLanes)
      for (int64_t k = 0; k < width; k += kLanes) save_square(at(o, i + k), j, k, width - k, n - j);
  }

 private:
  static constexpr int64_t kLanes = Simd<C>::lanes;

  // Up to kLanes elements, starting at j, of up to kLanes rows, starting at k. The buffer has room
  // for a whole square at its edge.
  void load_square(const T* p, int64_t j, int64_t k, int64_t rows, int64_t elements) const {
    Vec<C> square[kLanes] = {};
    for (int64_t t = 0; t < std::min(kLanes, elements); ++t) {
      const T* line = p + (j + t) * a_.element;
      if (a_.inner == 1)
        square[t] = load_as<C>(line, rows);
      else
        for (int64_t r = 0; r < std::min(kLanes, rows); ++r)
          square[t][r] = widen(line[r * a_.inner]);
    }
    transpose<C>(square);
    for (int64_t r = 0; r < std::min(kLanes, rows); ++r)
      polyvision::store<C>(buffer_.get() + (k + r) * pitch_ + j, square[r]);
  }

  void save_square(T* p, int64_t j, int64_t k, int64_t rows, int64_t elements) const {
    Vec<C> square[kLanes] = {};
    for (int64_t r = 0; r < std::min(kLanes, rows); ++r)
      square[r] = polyvision::load<C>(buffer_.get() + (k + r) * pitch_ + j);
    transpose<C>(square);
    for (int64_t t = 0; t < std::min(kLanes, elements); ++t) {
      T* line = p + (j + t) * a_.element;
      if (a_.inner == 1)
        store_as<C>(line, square[t], rows);
      else
        for (int64_t r = 0; r < std::min(kLanes, rows); ++r)
          narrow(C(square[t][r]), line + r * a_.inner);
    }
  }

  T* at(int64_t o, int64_t i) const {
    return reinterpret_cast<T*>(a_.address) + o * a_.outer + i * a_.inner;
  }

  Operand a_;
  int64_t pitch_;
  bool direct_;
  std::unique_ptr<C[]> buffer_;
};

// How the rows are shared out: units of neighbouring rows, blocks of units.
struct Plan {
  int64_t inner, width = 1, per_outer, units, blocks;
  int threads;

  explicit Plan(const Call& c) : inner(c.inner) {
    const bool apart = c.x.element != 1 && c.inner > 1;
    // Whole cache lines, several for the sake of prefetching, while the rows stay in the cache.
    if (apart) width = std::min(inner, std::clamp<int64_t>((1 << 16) / c.n / 32 * 32, 32, 256));
    per_outer = (inner + width - 1) / width;
    units = c.outer * per_outer;
    blocks = std::min<int64_t>(units, c.groups > 1 ? 32 : 256);
    threads = c.outer * c.inner * c.n < 32768 ? 1 : int(std::min(c.threads, blocks));
  }

  // Each thread makes a worker, with its buffers; worker(block, o, i, count) does one unit.
  template <class Make>
  void run(Make make) const {
#pragma omp parallel num_threads(threads)
    {
      auto worker = make();
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t u = b * units / blocks; u < (b + 1) * units / blocks; ++u) {
          const int64_t part = u % per_outer, i = part * inner / per_outer;
          worker(b, u / per_outer, i, (part + 1) * inner / per_outer - i);
        }
    }
  }
};

// The coefficients in the arithmetic type, and the sums for their gradients: one set for each block
// and group of (order weights, bias, slope).
template <class C>
struct Parameters {
  const Call& c;
  const int64_t sums;
  std::vector<C> weight, bias;
  C slope = 0;
  std::vector<double> partial;

  explicit Parameters(const Call& call)
      : c(call), sums(c.order + 2), weight(c.groups * c.order), bias(c.groups) {
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = C(get(c.weight, i));
    if (c.bias.address)
      for (size_t i = 0; i < bias.size(); ++i) bias[i] = C(get(c.bias, i));
    if (c.slope.address) slope = C(get(c.slope, 0));
  }

  int64_t group(int64_t o, int64_t i) const {
    return c.group ? reinterpret_cast<const int64_t*>(c.group)[o * c.inner + i] : 0;
  }

  void start(int64_t blocks) { partial.assign(blocks * c.groups * sums, 0.0); }
  double* at(int64_t block, int64_t group) { return &partial[(block * c.groups + group) * sums]; }

  void finish(int64_t blocks) {
    double slope_sum = 0;
    for (int64_t g = 0; g < c.groups; ++g) {
      std::vector<double> total(sums, 0.0);
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t i = 0; i < sums; ++i) total[i] += at(b, g)[i];
      if (c.dweight.address)
        for (int64_t i = 0; i < c.order; ++i) set(c.dweight, g * c.order + i, total[i]);
      if (c.dbias.address) set(c.dbias, g, total[c.order]);
      slope_sum += total[c.order + 1];
    }
    if (c.dslope.address) set(c.dslope, 0, slope_sum);
  }
};

// The row functions of one order.
template <class C>
struct RowFunctions {
  void (*norm_forward)(const C*, const RowShape&, const C*, C, C*, C*);
  void (*norm_value)(const C*, const RowShape&, const C*, C, const C*, C*);
  void (*norm_backward)(const C*, const C*, const RowShape&, const C*, const C*, C*, double*);
  void (*relu_forward)(const C*, int64_t, const C*, C, C, C*);
  void (*relu_backward)(const C*, const C*, int64_t, const C*, C, C*, double*);
};

template <class C, int... R>
const RowFunctions<C>& row_functions(int64_t order, std::integer_sequence<int, R...>) {
  static const RowFunctions<C> table[] = {
      {norm_forward_row<C, R + 1>, norm_value_row<C, R + 1>, norm_backward_row<C, R + 1>,
       relu_forward_row<C, R + 1>, relu_backward_row<C, R + 1>}...};
  return table[order - 1];
}

template <class C>
const RowFunctions<C>& row_functions(int64_t order) {
  return row_functions<C>(order, std::make_integer_sequence<int, kMaxOrder>{});
}

template <class C>
void multiply(const C* factor, C* row, int64_t n) {
  for (int64_t j = 0; j < n; ++j) row[j] *= factor[j];
}

template <class C>
void rectify(C* row, int64_t n) {
  for (int64_t j = 0; j < n; ++j) row[j] = row[j] <= 0 ? C(0) : row[j];
}

template <class C>
void mask(const C* x, C* dx, int64_t n) {
  for (int64_t j = 0; j < n; ++j) dx[j] = x[j] <= 0 ? C(0) : dx[j];
}

// One kernel for the four functions: `value(row number, x, y)` computes the rows of y before `mul`.
template <class T, class C, class Value>
auto forward_worker(const Call& c, const Plan& plan, Value value) {
  return [&c, value, x = Rows<T, C>(c.x, c.n, plan.width, c.rectify),
          mul = Rows<T, C>(c.mul, c.n, plan.width), out = Rows<T, C>(c.out, c.n, plan.width)](
             int64_t, int64_t o, int64_t i, int64_t count) {
    const int64_t n = c.length(o);
    x.load(o, i, count, n);
    if (mul) mul.load(o, i, count, n);
    for (int64_t k = 0; k < count; ++k) {
      C* row = x.row(o, i, k);
      C* y = out.row(o, i, k);
      if (c.rectify) rectify(row, n);
      value(o, i + k, n, row, y);
      if (mul) multiply(mul.row(o, i, k), y, n);
    }
    out.save(o, i, count, n);
  };
}

// `value` as above; `gradient(block, row, g, x, dx)` writes dx and adds to the sums.
template <class T, class C, class Value, class Gradient>
auto backward_worker(const Call& c, const Plan& plan, Value value, Gradient gradient) {
  return [&c, value, gradient, x = Rows<T, C>(c.x, c.n, plan.width, c.rectify),
          mul = Rows<T, C>(c.mul, c.n, plan.width),
          grad = Rows<T, C>(c.grad, c.n, plan.width, c.mul.address),
          out = Rows<T, C>(c.out, c.n, plan.width), dmul = Rows<T, C>(c.dmul, c.n, plan.width)](
             int64_t b, int64_t o, int64_t i, int64_t count) {
    const int64_t n = c.length(o);
    x.load(o, i, count, n);
    grad.load(o, i, count, n);
    if (mul) mul.load(o, i, count, n);
    for (int64_t k = 0; k < count; ++k) {
      C* row = x.row(o, i, k);
      C* g = grad.row(o, i, k);
      C* dx = out ? out.row(o, i, k) : nullptr;
      if (c.rectify) rectify(row, n);
      if (dmul) {
        value(o, i + k, n, row, dmul.row(o, i, k));
        multiply(g, dmul.row(o, i, k), n);
      }
      if (mul) multiply(mul.row(o, i, k), g, n);
      gradient(b, o, i + k, n, g, row, dx);
      if (dx && c.rectify) mask(row, dx, n);
    }
    if (out) out.save(o, i, count, n);
    if (dmul) dmul.save(o, i, count, n);
  };
}

template <class T, class C>
void norm(const Call& c, bool backward) {
  Parameters<C> p(c);
  const Plan plan(c);
  const RowFunctions<C>& functions = row_functions<C>(c.order);
  const RowShape shape{c.n, c.eps, int(std::log2(double(c.n)) / 4)};
  const auto stats = [&](int64_t o, int64_t i) {
    return reinterpret_cast<C*>(c.stats) + (o * c.inner + i) * c.order;
  };
  if (!backward) {
    plan.run([&] {
      return forward_worker<T, C>(c, plan, [&](int64_t o, int64_t i, int64_t, const C* x, C* y) {
        const int64_t group = p.group(o, i);
        functions.norm_forward(
            x, shape, &p.weight[group * c.order], p.bias[group], stats(o, i), y);
      });
    });
    return;
  }
  p.start(plan.blocks);
  plan.run([&] {
    return backward_worker<T, C>(
        c, plan,
        [&](int64_t o, int64_t i, int64_t, const C* x, C* y) {
          const int64_t group = p.group(o, i);
          functions.norm_value(
              x, shape, &p.weight[group * c.order], p.bias[group], stats(o, i), y);
        },
        [&](int64_t b, int64_t o, int64_t i, int64_t, const C* g, const C* x, C* dx) {
          const int64_t group = p.group(o, i);
          functions.norm_backward(
              g, x, shape, &p.weight[group * c.order], stats(o, i), dx, p.at(b, group));
        });
  });
  p.finish(plan.blocks);
}

template <class T, class C>
void relu(const Call& c, bool backward) {
  Parameters<C> p(c);
  const Plan plan(c);
  const RowFunctions<C>& functions = row_functions<C>(c.order);
  const auto value = [&](int64_t o, int64_t i, int64_t n, const C* x, C* y) {
    const int64_t group = p.group(o, i);
    functions.relu_forward(x, n, &p.weight[group * c.order], p.bias[group], p.slope, y);
  };
  if (!backward) {
    plan.run([&] { return forward_worker<T, C>(c, plan, value); });
    return;
  }
  p.start(plan.blocks);
  plan.run([&] {
    return backward_worker<T, C>(
        c, plan, value,
        [&](int64_t b, int64_t o, int64_t i, int64_t n, const C* g, const C* x, C* dx) {
          const int64_t group = p.group(o, i);
          functions.relu_backward(
              g, x, n, &p.weight[group * c.order], p.slope, dx, p.at(b, group));
        });
  });
  p.finish(plan.blocks);
}

bool groups_in_range(const Call& c) {
  const int64_t* first = reinterpret_cast<const int64_t*>(c.group);
  return !first || std::all_of(first, first + c.outer * c.inner,
                               [&](int64_t group) { return 0 <= group && group < c.groups; });
}

}  // namespace polyvision

// Returns 0, or 1 when the group of a row is out of range.
extern "C" int polyvision_run(const polyvision::Call* call, int is_norm, int backward) {
  using namespace polyvision;
  if (!groups_in_range(*call)) return 1;
  switch (call->type) {
    case kFloat: (is_norm ? norm<float, float> : relu<float, float>)(*call, backward); break;
    case kDouble: (is_norm ? norm<double, double> : relu<double, double>)(*call, backward); break;
    case kBFloat16: (is_norm ? norm<BFloat16, float> : relu<BFloat16, float>)(*call, backward); break;
    default: (is_norm ? norm<Half, float> : relu<Half, float>)(*call, backward);
  }
  return 0;
}
