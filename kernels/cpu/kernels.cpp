// PolyNorm and PolyReLU on CPU tensors of any layout, forward and backward: the C entry point.
//
// A tensor is seen as (outer, n, inner) with one stride each; a row is the n elements at one
// (outer, inner). What the vector loops cannot read where it lies is copied, a strip at a time.
//
// The work is cut into blocks whose number does not depend on the threads; each block sums the
// gradients of the coefficients in double, and the blocks are added in order: results do not depend
// on the number of threads.

#include <memory>
#include <vector>

#include "norm.h"
#include "relu.h"

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
  int64_t stats, group, groups, slopes, order, rectify, type, threads;
  int64_t outer, n, inner, last;  // last: the length of the rows of the last outer position
  double eps;

  int64_t length(int64_t o) const { return o == outer - 1 ? last : n; }
};

// Calls f with a null pointer of the storage type.
template <class F>
auto with_type(int64_t type, F f) {
  switch (type) {
    case kFloat: return f((float*)nullptr);
    case kDouble: return f((double*)nullptr);
    case kBFloat16: return f((BFloat16*)nullptr);
    default: return f((Half*)nullptr);
  }
}

double get(const Coefficients& c, int64_t i) {
  return with_type(c.type, [&](auto* p) {
    return double(load_head(reinterpret_cast<decltype(p)>(c.address) + i, 1)[0]);
  });
}

void set(const Coefficients& c, int64_t i, double value) {
  with_type(c.type, [&](auto* p) {
    using C = Arithmetic<std::remove_pointer_t<decltype(p)>>;
    store_head(reinterpret_cast<decltype(p)>(c.address) + i, broadcast(C(value)), 1);
  });
}

// One operand, opened a strip at a time: where it lies if the vector loops can read it there, else
// in a buffer.
template <class T, bool Across>
class View {
 public:
  View(const Operand& operand, int64_t n) : a_(operand), room_(Across ? n * kWide : n) {}

  bool direct(int64_t count) const {
    return Across ? a_.inner == 1 && count == kWide : a_.element == 1;
  }

  Strip<T> open(int64_t o, int64_t i, int64_t count, int64_t n) {
    if (!a_.address) return {};
    if (direct(count)) {
      if (Across) return {at(o, i), a_.element, kWide};
      // Short rows are left to the hardware.
      return {at(o, i), kWide, n < 1024 ? 0 : a_.inner ? a_.inner : a_.outer};
    }
    if (!buffer_) buffer_.reset(new T[room_]());
    return {buffer_.get(), kWide, 0};
  }

  Strip<const T> read(int64_t o, int64_t i, int64_t count, int64_t n) {
    const Strip<T> strip = open(o, i, count, n);
    if (strip && !direct(count)) {
      const T* p = at(o, i);
      // Lanes without a row must not hold those of an earlier strip: sums by element take all lanes.
      if (Across && count < kWide) std::fill_n(buffer_.get(), room_, T{});
      each(count, n, [&](T& copy, int64_t offset) { copy = p[offset]; });
    }
    return {strip.p, strip.step, strip.next};
  }

  void write(int64_t o, int64_t i, int64_t count, int64_t n) {
    if (!a_.address || direct(count)) return;
    T* p = at(o, i);
    each(count, n, [&](T& copy, int64_t offset) { p[offset] = copy; });
  }

 private:
  static constexpr int64_t kWide = kLanes<Arithmetic<T>>;

  T* at(int64_t o, int64_t i) const {
    return reinterpret_cast<T*>(a_.address) + o * a_.outer + i * a_.inner;
  }

  // Every element of the strip, with its place in the buffer; the shorter stride runs innermost.
  template <class F>
  void each(int64_t count, int64_t n, F f) {
    const int64_t row = Across ? 1 : 0, step = Across ? kWide : 1;
    T* buffer = buffer_.get();
    if (std::abs(a_.element) < std::abs(a_.inner))
      for (int64_t r = 0; r < count; ++r)
        for (int64_t j = 0; j < n; ++j)
          f(buffer[j * step + r * row], j * a_.element + r * a_.inner);
    else
      for (int64_t j = 0; j < n; ++j)
        for (int64_t r = 0; r < count; ++r)
          f(buffer[j * step + r * row], j * a_.element + r * a_.inner);
  }

  Operand a_;
  int64_t room_;
  std::unique_ptr<T[]> buffer_;
};

// The coefficients in the arithmetic type, and the sums for their gradients: for each block, one
// set a group of (order weights, bias, slope), and the slopes where each element has its own.
template <class C>
class Parameters {
 public:
  explicit Parameters(const Call& call)
      : c(call), weight_(c.groups * c.order), bias_(c.groups), set_(c.order + 2) {
    for (size_t i = 0; i < weight_.size(); ++i) weight_[i] = C(get(c.weight, i));
    if (c.bias.address)
      for (size_t i = 0; i < bias_.size(); ++i) bias_[i] = C(get(c.bias, i));
  }

  // The slopes as a strip: one for all elements, or one for each.
  template <bool Across>
  Strip<const C> slopes() {
    if (!c.slope.address) return {};
    constexpr int64_t wide = kLanes<C>, repeat = Across ? wide : 1;
    const bool one = c.slopes == 1;
    slopes_.assign(one ? wide : c.slopes * repeat + wide, C(0));
    const int64_t filled = one ? wide : c.slopes * repeat;
    for (int64_t j = 0; j < filled; ++j) slopes_[j] = C(get(c.slope, one ? 0 : j / repeat));
    return {slopes_.data(), one ? 0 : wide, 0};
  }

  int64_t group(int64_t o, int64_t i) const {
    return c.group ? reinterpret_cast<const int64_t*>(c.group)[o * c.inner + i] : 0;
  }
  const C* weight(int64_t group) const { return &weight_[group * c.order]; }
  C bias(int64_t group) const { return bias_[group]; }

  void start(int64_t blocks) {
    blocks_ = blocks;
    partial_.assign(blocks * c.groups * set_, 0.0);
    if (each_slope()) slope_sums_.assign(blocks * slope_room(), 0.0);
  }
  double* partial(int64_t block, int64_t group) {
    return &partial_[(block * c.groups + group) * set_];
  }
  double* slope_sums(int64_t block) {
    return slope_sums_.empty() ? nullptr : &slope_sums_[block * slope_room()];
  }

  void finish() {
    double slope_sum = 0;
    for (int64_t g = 0; g < c.groups; ++g) {
      std::vector<double> total(set_, 0.0);
      for (int64_t b = 0; b < blocks_; ++b)
        for (int64_t i = 0; i < set_; ++i) total[i] += partial(b, g)[i];
      if (c.dweight.address)
        for (int64_t i = 0; i < c.order; ++i) set(c.dweight, g * c.order + i, total[i]);
      if (c.dbias.address) set(c.dbias, g, total[c.order]);
      slope_sum += total[c.order + 1];
    }
    if (each_slope())
      for (int64_t j = 0; j < c.slopes; ++j) {
        double total = 0;
        for (int64_t b = 0; b < blocks_; ++b) total += slope_sums(b)[j];
        set(c.dslope, j, total);
      }
    else if (c.dslope.address)
      set(c.dslope, 0, slope_sum);
  }

 private:
  bool each_slope() const { return c.dslope.address && c.slopes > 1; }
  int64_t slope_room() const { return c.slopes + kLanes<C>; }

  const Call& c;
  std::vector<C> weight_, bias_, slopes_;
  int64_t set_, blocks_ = 0;
  std::vector<double> partial_, slope_sums_;
};

// Shares the strips out among the threads and runs f on each.
template <class T, bool Across, class F>
void run(const Call& c, bool backward, F f) {
  using C = Arithmetic<T>;
  using Strips = Rows<T, Across>;
  Parameters<C> parameters(c);
  const int64_t width = Strips::lanes, per_outer = (c.inner + width - 1) / width;
  const int64_t units = c.outer * per_outer;
  const int64_t blocks = std::min<int64_t>(units, c.groups > 1 || c.slopes > 1 ? 32 : 256);
  const int64_t threads =
      c.outer * c.inner * c.n < 32768 ? 1 : std::min(c.threads, blocks);
  const Strip<const C> slopes = parameters.template slopes<Across>();
  if (backward) parameters.start(blocks);

#pragma omp parallel num_threads(int(threads))
  {
    View<T, Across> x(c.x, c.n), grad(c.grad, c.n), mul(c.mul, c.n), out(c.out, c.n),
        dmul(c.dmul, c.n);
    Strips s;
    s.eps = c.eps;
    s.over_n = 1.0 / c.n;
    s.shift = int(std::log2(double(c.n)) / 4);
    s.x.rectify = c.rectify;
    s.slopes = slopes;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t u = block * units / blocks; u < (block + 1) * units / blocks; ++u) {
        const int64_t o = u / per_outer, i = u % per_outer * width;
        const int64_t count = std::min(width, c.inner - i), n = c.length(o);
        s.n = n;
        s.count = count;
        s.x.x = x.read(o, i, count, n);
        s.g.grad = grad.read(o, i, count, n);
        s.g.mul = s.mul = mul.read(o, i, count, n);
        s.out = out.open(o, i, count, n);
        s.dmul = dmul.open(o, i, count, n);
        s.slope_sums = parameters.slope_sums(block);
        s.stats = c.stats ? reinterpret_cast<C*>(c.stats) + (o * c.inner + i) * c.order : nullptr;
        for (int64_t r = 0; r < width; ++r) {
          const int64_t group = parameters.group(o, i + std::min(r, count - 1));
          s.weight[r] = parameters.weight(group);
          s.bias[r] = parameters.bias(group);
          s.partial[r] = backward ? parameters.partial(block, group) : nullptr;
        }
        f(s);
        out.write(o, i, count, n);
        dmul.write(o, i, count, n);
      }
  }
  if (backward) parameters.finish();
}

template <class T, bool Across, int R = kMaxOrder>
void of_order(const Call& c, bool is_norm, bool backward) {
  if constexpr (R > 1)
    if (c.order < R) return of_order<T, Across, R - 1>(c, is_norm, backward);
  using Function = void (*)(const Rows<T, Across>&);
  const Function norm = backward ? &Norm<T, R, Across>::backward : &Norm<T, R, Across>::forward;
  const Function relu = backward ? &Relu<T, R, Across>::backward : &Relu<T, R, Across>::forward;
  run<T, Across>(c, backward, is_norm ? norm : relu);
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
  with_type(call->type, [&](auto* p) {
    using T = std::remove_pointer_t<decltype(p)>;
    // Fewer rows than half the lanes are not worth the empty ones.
    const bool across = call->x.element != 1 && call->inner >= kLanes<Arithmetic<T>> / 2;
    (across ? &of_order<T, true> : &of_order<T, false>)(*call, is_norm, backward);
  });
  return 0;
}
