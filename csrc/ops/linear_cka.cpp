#include "cpu/linear_cka.h"

#include <tuple>

#include "ops/tensors.h"
#include "ops/threads.h"

namespace fedkernels {

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
  Representation of(int64_t start) const { return {array, start, columns}; }
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
      std::vector<int64_t> entries(count);
      for (int64_t index = 0; index < count; ++index) {
        int64_t rest = index, step = of.rows * of.columns;
        for (size_t i = dims; i-- > 0;) {
          entries[index] += size_of(of, i) == 1 ? 0 : rest % shape[i] * step;
          step *= size_of(of, i);
          rest /= shape[i];
        }
      }
      return entries;
    };
    first = starts(one);
    second = starts(other);
  }

  Tensor values(bool wide) const { return torch::stable::empty(shape, result_dtype(wide)); }

  // One for each problem, or an empty tensor where none is wanted.
  Tensor gradients(const Matrices& in, bool wide, bool wanted) const {
    if (!wanted) return torch::stable::empty({0}, result_dtype(wide));
    std::vector<int64_t> sizes = shape;
    sizes.insert(sizes.end(), {in.rows, in.columns});
    return torch::stable::empty(sizes, result_dtype(wide));
  }
  void* gradient_of(const Tensor& gradients, int64_t index) const {
    if (gradients.numel() == 0) return nullptr;
    return static_cast<char*>(gradients.data_ptr()) + gradients.numel() / count * index * gradients.element_size();
  }
};

static void run_here(int64_t count, int64_t, void (*task)(int64_t, int64_t, void*), void* context) {
  for (int64_t index = 0; index < count; ++index) task(index, 0, context);
}

// solve(index, threads, memory) for every problem, each of about so many multiplications: many small ones side by side,
// large ones one after another by all threads. The results are the same. Without memory solve tells how much it wants.
template <class Solve>
static void solve_all(int64_t count, double multiplications, const Solve& solve) {
  const Threads alone{run_here, 1};
  if (count == 0) return;
  if (count == 1 || multiplications > 5e8) {
    const Threads threads = multiplications < 1e6 ? alone : torch_threads();  // waking threads takes as long
    const auto memory = kernel_memory(solve(0, threads, nullptr));
    for (int64_t index = 0; index < count; ++index) solve(index, threads, memory.get());
    return;
  }
  const int64_t workers = std::min<int64_t>(count, torch_threads().workers);
  const int64_t each = (solve(0, alone, nullptr) + 63) / 64 * 64;
  const auto memory = kernel_memory(each * workers);
  for_each_task(count, workers,
                [&](int64_t index, int64_t worker) { solve(index, alone, memory.get() + worker * each); });
}

static void set(const Tensor& values, int64_t index, double value) {
  if (values.scalar_type() == ScalarType::Double) {
    static_cast<double*>(values.data_ptr())[index] = value;
  } else {
    static_cast<float*>(values.data_ptr())[index] = static_cast<float>(value);
  }
}

// -> The values [...], and the gradients of their sum, one for each problem: the inputs may be broadcast. A gradient
// that is not wanted is an empty tensor.
static std::tuple<Tensor, Tensor, Tensor> of_pairs(Tensor x, Tensor y, bool centered, bool debiased, bool x_gradient,
                                                   bool y_gradient) {
  const Matrices xs(x, "x"), ys(y, "y");
  STD_TORCH_CHECK(xs.rows == ys.rows, "x and y must have the same rows");
  const Batch batch(xs, ys);
  const bool wide = xs.wide() || ys.wide();
  const Tensor values = batch.values(wide);
  const Tensor in_x = batch.gradients(xs, wide, x_gradient), in_y = batch.gradients(ys, wide, y_gradient);
  const double rows = static_cast<double>(xs.rows), widths = static_cast<double>(xs.columns + ys.columns);
  solve_all(batch.count, rows * widths * std::min(rows, widths),
            [&](int64_t index, const Threads& threads, void* memory) {
              CKAProblem problem{xs.of(batch.first[index]),
                                 ys.of(batch.second[index]),
                                 xs.rows,
                                 centered,
                                 debiased,
                                 wide,
                                 0,
                                 batch.gradient_of(in_x, index),
                                 batch.gradient_of(in_y, index)};
              const int64_t bytes = FEDKERNELS_BEST(linear_cka)(problem, threads, memory);
              if (memory) set(values, index, problem.value);
              return bytes;
            });
  return {values, in_x, in_y};
}

static std::tuple<Tensor, Tensor, Tensor> linear_cka_cpu(Tensor x, Tensor y, bool centered, bool x_gradient,
                                                         bool y_gradient) {
  return of_pairs(x, y, centered, false, x_gradient, y_gradient);
}

static void check_debiased(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 2 && x.size(x.dim() - 2) >= 4, "debiased CKA needs at least 4 rows");
}

static std::tuple<Tensor, Tensor, Tensor> debiased_cka_cpu(Tensor x, Tensor y, bool x_gradient, bool y_gradient) {
  check_debiased(x);
  return of_pairs(x, y, true, true, x_gradient, y_gradient);
}

static std::tuple<Tensor, Tensor> linear_cka_to_kernel_cpu(Tensor x, Tensor kernel, bool centered, bool gradient) {
  const Matrices xs(x, "x"), kernels(kernel, "kernel");
  STD_TORCH_CHECK(kernels.rows == xs.rows && kernels.columns == xs.rows,
                  "kernel must be [..., L, L] for the L rows of x");
  const Batch batch(xs, kernels);
  const bool wide = xs.wide() || kernels.wide();
  const Tensor values = batch.values(wide), in_x = batch.gradients(xs, wide, gradient);
  const double rows = static_cast<double>(xs.rows);
  solve_all(batch.count, rows * rows * static_cast<double>(xs.columns),
            [&](int64_t index, const Threads& threads, void* memory) {
              CKAToKernelProblem problem{xs.of(batch.first[index]),
                                         kernels.of(batch.second[index]),
                                         xs.rows,
                                         centered,
                                         wide,
                                         0,
                                         batch.gradient_of(in_x, index)};
              const int64_t bytes = FEDKERNELS_BEST(linear_cka_to_kernel)(problem, threads, memory);
              if (memory) set(values, index, problem.value);
              return bytes;
            });
  return {values, in_x};
}

// -> The values [N, M]; no ys: the xs with one another. `own`: the unbiased HSIC of each with itself is wanted, and of
// the pairs in the place of their CKA.
static Tensor all_pairs(const std::vector<Tensor>& xs, const std::vector<Tensor>& ys, bool centered, bool debiased,
                        double* own = nullptr) {
  STD_TORCH_CHECK(!xs.empty(), "xs must not be empty");
  std::vector<Representation> all;
  int64_t rows = 0;
  bool wide = false;
  for (const auto* list : {&xs, &ys}) {
    for (const Tensor& tensor : *list) {
      const Matrices one(tensor, "xs and ys");
      STD_TORCH_CHECK(one.batch.empty() && (all.empty() || one.rows == rows), "xs and ys must have the same rows");
      rows = one.rows;
      wide |= one.wide();
      all.push_back(one.of(0));
    }
  }
  const int64_t count = all.size(), first = xs.size(), columns = ys.empty() ? first : ys.size();
  std::vector<double> values(first * columns);
  const CKAPairwiseProblem problem{all.data(), count, first, rows, centered, debiased, wide, values.data(), own};
  run_kernel([&](const Threads& threads, void* memory) {
    return FEDKERNELS_BEST(linear_cka_pairwise)(problem, threads, memory);
  });
  const Tensor result = torch::stable::empty({first, columns}, result_dtype(wide || own));
  for (int64_t i = 0; i < first * columns; ++i) set(result, i, values[i]);
  return result;
}

static Tensor linear_cka_pairwise_cpu(std::vector<Tensor> xs, std::vector<Tensor> ys, bool centered) {
  return all_pairs(xs, ys, centered, false);
}

static Tensor debiased_cka_pairwise_cpu(std::vector<Tensor> xs, std::vector<Tensor> ys) {
  STD_TORCH_CHECK(!xs.empty(), "xs must not be empty");
  check_debiased(xs[0]);
  return all_pairs(xs, ys, true, true);
}

// -> [N, M], [N] and [M].
static std::tuple<Tensor, Tensor, Tensor> hsic_pairwise_cpu(std::vector<Tensor> xs, std::vector<Tensor> ys) {
  STD_TORCH_CHECK(!xs.empty() && !ys.empty(), "xs and ys must not be empty");
  check_debiased(xs[0]);
  const int64_t first = xs.size(), others = ys.size();
  std::vector<double> own(first + others);
  const Tensor of_pairs = all_pairs(xs, ys, true, true, own.data());
  const Tensor of_xs = torch::stable::empty({first}, ScalarType::Double);
  const Tensor of_ys = torch::stable::empty({others}, ScalarType::Double);
  for (int64_t i = 0; i < first; ++i) set(of_xs, i, own[i]);
  for (int64_t i = 0; i < others; ++i) set(of_ys, i, own[first + i]);
  return {of_pairs, of_xs, of_ys};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) {
  m.impl("debiased_cka", TORCH_BOX(&debiased_cka_cpu));
  m.impl("debiased_cka_pairwise", TORCH_BOX(&debiased_cka_pairwise_cpu));
  m.impl("hsic_pairwise", TORCH_BOX(&hsic_pairwise_cpu));
  m.impl("linear_cka", TORCH_BOX(&linear_cka_cpu));
  m.impl("linear_cka_to_kernel", TORCH_BOX(&linear_cka_to_kernel_cpu));
  m.impl("linear_cka_pairwise", TORCH_BOX(&linear_cka_pairwise_cpu));
}

}  // namespace fedkernels
