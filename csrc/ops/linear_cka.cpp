#include "cpu/linear_cka.h"

#include <cmath>
#include <cstring>
#include <tuple>

#include "ops/tensors.h"
#include "ops/threads.h"

namespace fedkernels {

static ScalarType dtype_for(bool wide) { return wide ? ScalarType::Double : ScalarType::Float; }

static Tensor nothing(bool wide) { return torch::stable::empty({0}, dtype_for(wide)); }

// The matrices [..., rows, columns] of a tensor.
struct Matrices {
  Array array;
  std::vector<int64_t> batch;
  int64_t rows, columns;

  Matrices(const Tensor& tensor, const char* name) : array(array_of(tensor, name)) {
    STD_TORCH_CHECK(tensor.dim() >= 2, name, " must have shape [..., rows, columns]");
    for (int64_t i = 0; i < tensor.dim() - 2; ++i) batch.push_back(tensor.size(i));
    rows = tensor.size(tensor.dim() - 2);
    columns = tensor.size(tensor.dim() - 1);
    STD_TORCH_CHECK(rows > 0 && columns > 0, name, " must have rows and columns");
  }

  bool wide() const { return array.dtype == DType::f64; }
};

// Two broadcast against each other: the entry at which each problem's matrices start.
struct Batch {
  std::vector<int64_t> shape, first, second;
  int64_t count = 1;

  Batch(const Matrices& one, const Matrices& other) {
    const size_t dims = std::max(one.batch.size(), other.batch.size());
    const auto size_of = [&](const Matrices& of, size_t i) {
      const size_t missing = dims - of.batch.size();
      return i < missing ? 1 : of.batch[i - missing];
    };
    for (size_t i = 0; i < dims; ++i) {
      const int64_t a = size_of(one, i), b = size_of(other, i);
      STD_TORCH_CHECK(a == b || a == 1 || b == 1, "leading dimensions must broadcast");
      shape.push_back(a == 1 ? b : a);
      count *= shape.back();
    }
    const auto starts = [&](const Matrices& of) {
      std::vector<int64_t> found(count);
      for (int64_t index = 0; index < count; ++index) {
        int64_t rest = index, step = of.rows * of.columns;
        for (size_t i = dims; i-- > 0;) {
          found[index] += size_of(of, i) == 1 ? 0 : rest % shape[i] * step;
          step *= size_of(of, i);
          rest /= shape[i];
        }
      }
      return found;
    };
    first = starts(one);
    second = starts(other);
  }

  std::vector<int64_t> and_then(std::initializer_list<int64_t> sizes) const {
    std::vector<int64_t> all = shape;
    all.insert(all.end(), sizes);
    return all;
  }
  Tensor empty(ScalarType dtype, std::initializer_list<int64_t> sizes) const {
    return torch::stable::empty(and_then(sizes), dtype);
  }
  // One tensor for all problems, or none; and what belongs to one of them.
  Tensor kept(bool wanted, bool wide, std::initializer_list<int64_t> sizes) const {
    return wanted ? empty(dtype_for(wide), sizes) : nothing(wide);
  }
  void* of(const Tensor& tensor, int64_t index) const {
    if (tensor.numel() == 0) return nullptr;
    return static_cast<char*>(tensor.data_ptr()) + tensor.numel() / count * index * tensor.element_size();
  }
};

static void run_here(int64_t count, int64_t, void (*task)(int64_t, int64_t, void*), void* context) {
  for (int64_t index = 0; index < count; ++index) task(index, 0, context);
}

// solve(index, threads, memory) for every problem, each of about so many multiplications: many small ones side by side,
// large ones one after another by all threads. The results are the same. Without memory solve tells how much it wants.
template <class Solve>
void solve_all(int64_t count, double multiplications, const Solve& solve) {
  const Threads alone{run_here, 1};
  const Threads threads = multiplications < 1e6 ? alone : torch_threads();
  if (count == 0) return;
  if (count == 1 || multiplications > 5e8) {
    const auto memory = kernel_memory(solve(0, threads, nullptr));
    for (int64_t index = 0; index < count; ++index) solve(index, threads, memory.get());
    return;
  }
  const int64_t workers = std::min<int64_t>(count, torch_threads().workers);
  const int64_t each = (solve(0, alone, nullptr) + 63) / 64 * 64;
  const auto memory = kernel_memory(each * workers);
  const auto task = [&](int64_t index, int64_t worker) { solve(index, alone, memory.get() + worker * each); };
  run_tasks(
      count, workers,
      [](int64_t index, int64_t worker, void* context) {
        (*static_cast<decltype(task)*>(context))(index, worker);
      },
      const_cast<void*>(static_cast<const void*>(&task)));
}

static double alignment(double cross, double xx, double yy) {
  if (xx == 0 || yy == 0) return 0;
  return cross / (std::sqrt(xx) * std::sqrt(yy));
}

// A sum of squares in disguise: below 0 it is rounding.
static double above_zero(double cross) { return cross < 0 ? 0 : cross; }

static void set(const Tensor& values, int64_t index, double value) {
  if (values.scalar_type() == ScalarType::Double) {
    static_cast<double*>(values.data_ptr())[index] = value;
  } else {
    static_cast<float*>(values.data_ptr())[index] = static_cast<float>(value);
  }
}

// What is known of a problem once its value is: doubles, followed by the centers.
enum State { CROSS, XX, YY, X_SCALE, Y_SCALE, CENTERS };

// Factors of the gradient's parts; the gradient is 0 where the value is 0 by definition.
struct Factors {
  bool zero;
  double cross, xx, yy;

  Factors(double upstream, const double* state) {
    const double value = alignment(state[CROSS], state[XX], state[YY]);
    zero = state[XX] == 0 || state[YY] == 0;
    const double by = std::isnan(value) ? value : 2 * upstream;
    cross = by / (std::sqrt(state[XX]) * std::sqrt(state[YY]));
    xx = -by * value / state[XX];
    yy = -by * value / state[YY];
  }
};

static void fill_zero(void* gradient, int64_t count, bool wide) {
  if (gradient) std::memset(gradient, 0, count * (wide ? 8 : 4));
}

// linear_cka

static double multiplications(double rows, double x_width, double y_width, bool sample_space) {
  return rows * (x_width + y_width) * (sample_space ? rows : x_width + y_width);
}

// -> value [...]; state [..., 5 or more]; y'x, x'x and y'y, or in sample space nothing, xx' and yy': empty unless kept.
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_cka_cpu(Tensor x, Tensor y, bool centered,
                                                                         bool sample_space, bool keep) {
  const Matrices xs(x, "x"), ys(y, "y");
  STD_TORCH_CHECK(xs.rows == ys.rows, "x and y must have the same rows");
  const Batch batch(xs, ys);
  const int64_t rows = xs.rows, x_width = xs.columns, y_width = ys.columns;
  const bool wide = xs.wide() || ys.wide();
  const int64_t x_side = sample_space ? rows : x_width, y_side = sample_space ? rows : y_width;
  const int64_t numbers = CENTERS + (centered ? x_width + y_width : 0);
  Tensor value = batch.empty(dtype_for(wide), {});
  Tensor state = batch.empty(ScalarType::Double, {numbers});
  Tensor cross = batch.kept(keep && !sample_space, wide, {y_width, x_width});
  Tensor xx = batch.kept(keep, wide, {x_side, x_side}), yy = batch.kept(keep, wide, {y_side, y_side});
  solve_all(batch.count, multiplications(rows, x_width, y_width, sample_space),
            [&](int64_t index, const Threads& threads, void* memory) {
              double* const own = static_cast<double*>(batch.of(state, index));
              double* const center = centered ? own + CENTERS : nullptr;
              Representation both[] = {{xs.array, batch.first[index], x_width, 1, center},
                                       {ys.array, batch.second[index], y_width, 1, centered ? center + x_width : nullptr}};
              void* norms[] = {batch.of(xx, index), batch.of(yy, index)};
              const CKAProducts problem{both,     2,          1,          rows,
                                        wide,     sample_space, own + XX, own + CROSS, batch.of(cross, index),
                                        keep ? norms : nullptr};
              const int64_t bytes = FEDKERNELS_BEST(cka_products)(problem, threads, memory);
              if (memory) {
                own[X_SCALE] = both[0].scale;
                own[Y_SCALE] = both[1].scale;
                own[CROSS] = above_zero(own[CROSS]);
                set(value, index, alignment(own[CROSS], own[XX], own[YY]));
              }
              return bytes;
            });
  return {value, state, cross, xx, yy};
}

static const double* upstream_of(const Tensor& grad, int64_t count) {
  STD_TORCH_CHECK(grad.is_cpu() && grad.is_contiguous() && grad.scalar_type() == ScalarType::Double &&
                      grad.numel() == count,
                  "grad must be float64 on the CPU, one for each value");
  return static_cast<const double*>(grad.data_ptr());
}

static void check_kept(const Tensor& kept, int64_t numel, ScalarType dtype) {
  STD_TORCH_CHECK(kept.is_cpu() && kept.is_contiguous() && kept.scalar_type() == dtype && kept.numel() == numel,
                  "the state and the products must be those that came with the value");
}

// The gradients have the shape of all problems, also where an input was broadcast; empty: not wanted.
static std::tuple<Tensor, Tensor> linear_cka_gradients_cpu(Tensor grad, Tensor x, Tensor y, Tensor state, Tensor cross,
                                                           Tensor xx, Tensor yy, bool centered, bool sample_space,
                                                           bool x_gradient, bool y_gradient) {
  const Matrices xs(x, "x"), ys(y, "y");
  STD_TORCH_CHECK(xs.rows == ys.rows, "x and y must have the same rows");
  const Batch batch(xs, ys);
  const int64_t rows = xs.rows, x_width = xs.columns, y_width = ys.columns;
  const bool wide = xs.wide() || ys.wide();
  const int64_t x_side = sample_space ? rows : x_width, y_side = sample_space ? rows : y_width;
  const double* upstream = upstream_of(grad, batch.count);
  check_kept(state, batch.count * (CENTERS + (centered ? x_width + y_width : 0)), ScalarType::Double);
  check_kept(cross, sample_space ? 0 : batch.count * x_width * y_width, dtype_for(wide));
  check_kept(xx, batch.count * x_side * x_side, dtype_for(wide));
  check_kept(yy, batch.count * y_side * y_side, dtype_for(wide));
  Tensor in_x = batch.kept(x_gradient, wide, {rows, x_width}), in_y = batch.kept(y_gradient, wide, {rows, y_width});
  solve_all(batch.count, multiplications(rows, x_width, y_width, sample_space),
            [&](int64_t index, const Threads& threads, void* memory) {
              double* const own = static_cast<double*>(batch.of(state, index));
              double* const center = centered ? own + CENTERS : nullptr;
              const Factors by(upstream[index], own);
              const CKAGradients problem{
                  {xs.array, batch.first[index], x_width, own[X_SCALE], center},
                  {ys.array, batch.second[index], y_width, own[Y_SCALE], center ? center + x_width : nullptr},
                  rows, wide, sample_space, batch.of(cross, index), batch.of(xx, index), batch.of(yy, index),
                  by.cross, by.xx, by.yy, batch.of(in_x, index), batch.of(in_y, index)};
              if (!memory || !(by.zero || own[CROSS] == 0)) return FEDKERNELS_BEST(cka_gradients)(problem, threads, memory);
              fill_zero(problem.x_gradient, rows * x_width, wide);
              fill_zero(problem.y_gradient, rows * y_width, wide);
              return int64_t{0};
            });
  return {in_x, in_y};
}

// linear_cka_to_kernel

static double kernel_multiplications(double rows, double width) { return rows * rows * width; }

static void check_kernel(const Matrices& xs, const Matrices& kernels) {
  STD_TORCH_CHECK(kernels.rows == xs.rows && kernels.columns == xs.rows,
                  "kernel must be [..., L, L] for the L rows of x");
}

static KernelProducts kernel_problem(const Matrices& xs, const Matrices& kernels, const Batch& batch, int64_t index,
                                     double* state, bool centered, bool sample_space, const Tensor& product,
                                     const Tensor& xx) {
  double* const center = centered ? state + CENTERS : nullptr;
  const int64_t rows = xs.rows, width = xs.columns;
  return {{xs.array, batch.first[index], width, state[X_SCALE], center},
          kernels.array,
          batch.second[index],
          rows,
          state[Y_SCALE],
          center ? center + width : nullptr,
          center ? center + width + rows : nullptr,
          xs.wide() || kernels.wide(),
          sample_space,
          0,
          0,
          0,
          batch.of(product, index),
          batch.of(xx, index)};
}

// -> value [...]; state [..., 5 or more]; Kx and x'x, or in sample space nothing and xx': empty unless kept.
static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_cka_to_kernel_cpu(Tensor x, Tensor kernel, bool centered,
                                                                           bool sample_space, bool keep) {
  const Matrices xs(x, "x"), kernels(kernel, "kernel");
  check_kernel(xs, kernels);
  STD_TORCH_CHECK(keep || sample_space, "without gradients the value is found in sample space");
  const Batch batch(xs, kernels);
  const int64_t rows = xs.rows, width = xs.columns, side = sample_space ? rows : width;
  const bool wide = xs.wide() || kernels.wide();
  Tensor value = batch.empty(dtype_for(wide), {});
  Tensor state = batch.empty(ScalarType::Double, {CENTERS + (centered ? width + 2 * rows : 0)});
  Tensor product = batch.kept(keep && !sample_space, wide, {rows, width});
  Tensor xx = batch.kept(keep, wide, {side, side});
  solve_all(batch.count, kernel_multiplications(rows, width),
            [&](int64_t index, const Threads& threads, void* memory) {
              double* const own = static_cast<double*>(batch.of(state, index));
              own[X_SCALE] = own[Y_SCALE] = 1;
              KernelProducts problem =
                  kernel_problem(xs, kernels, batch, index, own, centered, sample_space, product, xx);
              const int64_t bytes = FEDKERNELS_BEST(kernel_products)(problem, threads, memory);
              if (memory) {
                own[CROSS] = problem.trace;
                own[XX] = problem.x_norm;
                own[YY] = problem.kernel_norm;
                own[X_SCALE] = problem.x.scale;
                own[Y_SCALE] = problem.kernel_scale;
                set(value, index, alignment(own[CROSS], own[XX], own[YY]));
              }
              return bytes;
            });
  return {value, state, product, xx};
}

static Tensor linear_cka_to_kernel_gradient_cpu(Tensor grad, Tensor x, Tensor kernel, Tensor state, Tensor product,
                                                Tensor xx, bool centered, bool sample_space) {
  const Matrices xs(x, "x"), kernels(kernel, "kernel");
  check_kernel(xs, kernels);
  const Batch batch(xs, kernels);
  const int64_t rows = xs.rows, width = xs.columns, side = sample_space ? rows : width;
  const bool wide = xs.wide() || kernels.wide();
  const double* upstream = upstream_of(grad, batch.count);
  check_kept(state, batch.count * (CENTERS + (centered ? width + 2 * rows : 0)), ScalarType::Double);
  check_kept(product, sample_space ? 0 : batch.count * rows * width, dtype_for(wide));
  check_kept(xx, batch.count * side * side, dtype_for(wide));
  Tensor in_x = batch.empty(dtype_for(wide), {rows, width});
  solve_all(batch.count, kernel_multiplications(rows, width),
            [&](int64_t index, const Threads& threads, void* memory) {
              double* const own = static_cast<double*>(batch.of(state, index));
              const Factors by(upstream[index], own);
              const KernelGradient problem{
                  kernel_problem(xs, kernels, batch, index, own, centered, sample_space, product, xx), by.cross, by.xx,
                  batch.of(in_x, index)};
              if (!memory || !by.zero) return FEDKERNELS_BEST(kernel_gradient)(problem, threads, memory);
              fill_zero(problem.gradient, rows * width, wide);
              return int64_t{0};
            });
  return in_x;
}

// linear_cka_pairwise

// Multiplications of the products in either space; the inner products of Gram matrices are in double, about 4 times as
// slow.
static bool cheaper_in_sample_space(const CKAProducts& problem) {
  double widths[2] = {}, squares = 0;
  for (int64_t i = 0; i < problem.count; ++i) {
    const double width = problem.matrices[i].width;
    widths[i >= problem.first] += width;
    squares += width * width;
  }
  const bool same = problem.first == problem.count;
  const double rows = problem.rows, first = problem.first, others = problem.count - problem.first;
  const double across = same ? (widths[0] * widths[0] - squares) / 2 : widths[0] * widths[1];
  const double meetings = same ? first * (first + 1) / 2 : first * others + first + others;
  return rows * (widths[0] + widths[1] + 4 * meetings) < 2 * across + squares;
}

// -> [N, M]; no ys: the xs with one another.
static Tensor linear_cka_pairwise_cpu(std::vector<Tensor> xs, std::vector<Tensor> ys, bool centered) {
  std::vector<Representation> all;
  STD_TORCH_CHECK(!xs.empty(), "xs must not be empty");
  int64_t rows = 0, widths = 0;
  bool wide = false;
  for (const auto* list : {&xs, &ys}) {
    for (const Tensor& tensor : *list) {
      const Matrices one(tensor, "xs and ys");
      STD_TORCH_CHECK(one.batch.empty() && (all.empty() || one.rows == rows), "xs and ys must have the same rows");
      rows = one.rows;
      widths += one.columns;
      wide |= one.wide();
      all.push_back({one.array, 0, one.columns, 1, nullptr});
    }
  }
  std::vector<double> centers(centered ? widths : 0);
  for (int64_t i = 0, at = 0; centered && i < static_cast<int64_t>(all.size()); at += all[i++].width) {
    all[i].center = centers.data() + at;
  }
  const int64_t count = all.size(), first = xs.size(), columns = ys.empty() ? first : ys.size();
  std::vector<double> norms(count), cross(first * columns);
  CKAProducts problem{all.data(), count,        first,        rows,    wide,
                      false,      norms.data(), cross.data(), nullptr, nullptr};
  problem.sample_space = cheaper_in_sample_space(problem);
  const Threads threads = torch_threads();
  const auto memory = kernel_memory(FEDKERNELS_BEST(cka_products)(problem, threads, nullptr));
  FEDKERNELS_BEST(cka_products)(problem, threads, memory.get());
  Tensor result = torch::stable::empty({first, columns}, dtype_for(wide));
  for (int64_t n = 0; n < first; ++n) {
    for (int64_t m = 0; m < columns; ++m) {
      const double other = norms[ys.empty() ? m : first + m];
      set(result, n * columns + m, alignment(above_zero(cross[n * columns + m]), norms[n], other));
    }
  }
  return result;
}

STABLE_TORCH_LIBRARY_FRAGMENT(fedkernels, m) {
  m.def(
      "linear_cka(Tensor x, Tensor y, bool centered, bool sample_space, bool keep)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_cka_gradients(Tensor grad, Tensor x, Tensor y, Tensor state, Tensor cross, Tensor xx, Tensor yy,"
      " bool centered, bool sample_space, bool x_gradient, bool y_gradient) -> (Tensor, Tensor)");
  m.def(
      "linear_cka_to_kernel(Tensor x, Tensor kernel, bool centered, bool sample_space, bool keep)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_cka_to_kernel_gradient(Tensor grad, Tensor x, Tensor kernel, Tensor state, Tensor product, Tensor xx,"
      " bool centered, bool sample_space) -> Tensor");
  m.def("linear_cka_pairwise(Tensor[] xs, Tensor[] ys, bool centered) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) {
  m.impl("linear_cka", TORCH_BOX(&linear_cka_cpu));
  m.impl("linear_cka_gradients", TORCH_BOX(&linear_cka_gradients_cpu));
  m.impl("linear_cka_to_kernel", TORCH_BOX(&linear_cka_to_kernel_cpu));
  m.impl("linear_cka_to_kernel_gradient", TORCH_BOX(&linear_cka_to_kernel_gradient_cpu));
  m.impl("linear_cka_pairwise", TORCH_BOX(&linear_cka_pairwise_cpu));
}

}  // namespace fedkernels
