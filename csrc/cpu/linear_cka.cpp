// Everything is products in tiles of gemm.h, on pieces that stay in the cache. With z_1, z_2, .. of the same rows, CKA
// of two is |z_2'z_1|^2 / (|z_1'z_1| |z_2'z_2|). In feature space these products are formed as they stand there,
// [width, width]. In sample space they are the Gram matrices z z', [rows, rows], whose inner products are the same
// numbers. Each problem is solved in the space that takes fewer multiplications.
//
// Products are in T, sums over their entries in double. Symmetric products are formed on and above the diagonal. The
// pieces depend on the sizes alone, and sums over pieces are added in order.
#include "cpu/linear_cka.h"

#include "cpu/linear_cka_feature_space.h"
#include "cpu/linear_cka_kernel.h"
#include "cpu/linear_cka_sample_space.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

template <class T>
int64_t solve(CKAProblem& problem, const Threads& threads, Memory memory) {
  const Representation both[] = {problem.x, problem.y};
  const int64_t rows = problem.rows, x_width = problem.x.width, y_width = problem.y.width;
  const Matrices<T> matrices(both, 2, 1, rows, problem.centered, problem.debiased, threads.workers, memory);
  const bool in_sample_space = rows < x_width + y_width;
  // -> The factors of the gradients, or none where these are filled already.
  const auto find_value = [&](const auto& space) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      matrices.find_centers(threads);
      space.run(threads);
      if (!matrices.rescale()) break;
    }
    Ratio ratio = matrices.debiased
                      ? debiased_ratio(matrices, 0, 1, in_sample_space)
                      : Ratio(above_zero(matrices.inner[1]), matrices.norm(0), matrices.norm(1));
    problem.value = ratio.value;
    ratio.zero |= !matrices.debiased && ratio.value == 0;  // the least that it can be
    if (ratio.zero) {
      fill<T>(problem.x_gradient, rows * x_width, ratio.value);
      fill<T>(problem.y_gradient, rows * y_width, ratio.value);
    }
    return ratio;
  };

  if (in_sample_space) {
    const SampleSpace<T> space(matrices, problem.x_gradient || problem.y_gradient, threads.workers, memory);
    const SampleGradients<T> formed(matrices, threads.workers, memory);
    if (!memory.base) return memory.used;
    const Ratio by = find_value(space);
    const auto form = [&](int64_t i, double of_own, void* gradient) {
      formed.run(i, gradient, threads, [&](int64_t r, T* row) {
        const T *own = space.gram(i) + r * rows, *other = space.gram(1 - i) + r * rows;
        for (int64_t c = 0; c < rows; ++c) row[c] = (T)((double)other[c] * by.of_cross + (double)own[c] * of_own);
      });
    };
    if (by.zero) return memory.used;
    form(0, by.of_xx, problem.x_gradient);
    form(1, by.of_yy, problem.y_gradient);
    return memory.used;
  }
  const FeatureSpace<T> space(matrices, problem.x_gradient, problem.y_gradient, memory);
  const FeatureGradients<T> formed(matrices, memory);
  if (!memory.base) return memory.used;
  const Ratio by = find_value(space);
  if (by.zero) return memory.used;
  const T *xx = space.product[0].out, *cross = space.product[1].out, *yy = space.product[2].out;
  formed.run(0, 1, cross, x_width, 1, by.of_cross, xx, by.of_xx, problem.x_gradient, threads);
  formed.run(1, 0, cross, 1, x_width, by.of_cross, yy, by.of_yy, problem.y_gradient, threads);
  return memory.used;
}

template <class T>
int64_t solve(CKAToKernelProblem& problem, const Threads& threads, Memory memory) {
  const int64_t rows = problem.rows, width = problem.x.width, workers = threads.workers;
  T* const gradient = (T*)problem.gradient;
  const Matrices<T> matrices(&problem.x, 1, 1, rows, problem.centered, false, workers, memory);
  Kernel<T> kernel(problem, workers, memory);
  KernelSums sums{memory.take<double>(2 * up(rows, TILE_ROWS))};
  const auto find_value = [&](const auto& products) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      matrices.find_centers(threads);
      kernel.find_centers(threads);
      products();
      if (!(matrices.rescale() | kernel.rescale(sums.norm))) break;
    }
    const Ratio ratio(sums.trace, matrices.norm(0), sums.norm);
    problem.value = ratio.value;
    if (ratio.zero) fill<T>(gradient, rows * width, ratio.value);
    return ratio;
  };

  // Half of xx' costs half of what Kx does and <K, xx'> is the value too; but its gradient takes one more [rows, rows]
  // product, and space for xx'.
  if (!gradient || rows < 3 * width) {
    const SampleSpace<T> space(matrices, gradient, workers, memory);
    const SampleGradients<T> formed(matrices, workers, memory);
    const int64_t size = space.size;
    T* const blocks = memory.take<T>(workers * 2 * size * size);
    if (!memory.base) return memory.used;
    const Ratio by = find_value([&] {
      for (int64_t i = 0; i < 2 * space.blocks; ++i) sums.of_blocks[i] = 0;
      space.run(threads, [&](int64_t i, int64_t j, const T* gram, int64_t pitch, int64_t worker) {
        T *const block = blocks + worker * 2 * size * size, *const opposite = block + size * size;
        const int64_t height = space.rows_of(i), columns = space.rows_of(j);
        double norm = 0;
        for (int64_t r = 0; r < height; ++r) {
          norm += kernel.read(block + r * pitch, i * size + r, j * size, columns);
          for (int64_t c = columns; c < pitch; ++c) block[r * pitch + c] = 0;
        }
        for (int64_t c = 0; i < j && c < columns; ++c) {  // what lies below the diagonal, and may be no mirror image
          norm += kernel.read(opposite, j * size + c, i * size, height);
          for (int64_t r = 0; r < height; ++r) block[r * pitch + c] += opposite[r];
        }
        sums.of_blocks[2 * j] += inner(gram, block, height * pitch);
        sums.of_blocks[2 * j + 1] += norm;
      });
      sums.join(space.blocks);
    });
    if (by.zero) return memory.used;
    formed.run(0, gradient, threads, [&](int64_t r, T* row) {
      const T* const own = space.gram(0) + r * rows;
      kernel.read(row, r, 0, rows);
      for (int64_t c = 0; c < rows; ++c) row[c] = (T)((double)row[c] * by.of_cross + (double)own[c] * by.of_xx);
    });
    return memory.used;
  }

  const FeatureSpace<T> space(matrices, true, true, memory);
  const FeatureGradients<T> formed(matrices, memory);
  const Packed<T> packed(matrices, memory);
  T* const left = memory.take<T>(workers * ROWS * DEPTH);
  if (!memory.base) return memory.used;
  const Ratio by = find_value([&] {
    space.run(threads);
    packed.pack(0, threads);
    for_each(threads, kernel.blocks, [&](int64_t block, int64_t worker) {  // Kx, kept where the gradient will be
      const int64_t first = block * ROWS, count = least(ROWS, rows - first);
      T* const own = left + worker * ROWS * DEPTH;
      T* const target = gradient + first * width;
      double norm = 0;
      for (int64_t start = 0; start < rows; start += DEPTH) {
        const int64_t depth = least(DEPTH, rows - start);
        for (int64_t r = 0; r < count; ++r) norm += kernel.read(own + r * DEPTH, first + r, start, depth);
        multiply(start > 0, own, DEPTH, packed.panels + start * TILE_COLUMNS<T>, packed.pitch(), depth, target, width,
                 count, width);
      }
      const T* of_x = matrices.matrix[0].block(first, count, matrices.buffer(worker));
      sums.of_blocks[2 * block] = inner(of_x, target, count * width);
      sums.of_blocks[2 * block + 1] = norm;
    });
    sums.join(kernel.blocks);
  });
  if (!by.zero) {
    formed.run(0, 0, nullptr, 0, 0, by.of_cross, space.product[0].out, by.of_xx, gradient, threads);
  }
  return memory.used;
}

// Multiplications of the products in either space; the inner products of Gram matrices are in double, about 4 times as
// slow.
bool cheaper_in_sample_space(const CKAPairwiseProblem& problem) {
  double widths[2] = {}, squares = 0;
  for (int64_t i = 0; i < problem.count; ++i) {
    const double width = (double)problem.representations[i].width;
    widths[i >= problem.first] += width;
    squares += width * width;
  }
  const bool same = problem.first == problem.count;
  const double rows = (double)problem.rows, first = (double)problem.first, others = (double)problem.count - first;
  const double across = same ? (widths[0] * widths[0] - squares) / 2 : widths[0] * widths[1];
  const double meetings = same ? first * (first + 1) / 2 : first * others + first + others;
  return rows * (widths[0] + widths[1] + 4 * meetings) < 2 * across + squares;
}

template <class T>
int64_t solve(const CKAPairwiseProblem& problem, const Threads& threads, Memory memory) {
  const int64_t count = problem.count, first = problem.first;
  const Matrices<T> matrices(problem.representations, count, first, problem.rows, problem.centered,
                             problem.debiased, threads.workers, memory);
  const auto find_values = [&](const auto& space, bool in_sample_space) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      matrices.find_centers(threads);
      space.run(threads);
      if (!matrices.rescale()) break;
    }
    const int64_t others = first == count ? 0 : first;
    for (int64_t i = 0; problem.own && i < count; ++i) {
      problem.own[i] = own_hsic(matrices, i, in_sample_space) / matrices.product_scale(i, i);
    }
    for (int64_t i = 0; i < first; ++i) {
      for (int64_t j = others; j < count; ++j) {
        double& value = problem.values[i * (count - others) + j - others];
        if (problem.own) {
          value = hsic(matrices, i, j, in_sample_space) / matrices.product_scale(i, j);
          continue;
        }
        if (matrices.debiased) {
          value = debiased_ratio(matrices, i, j, in_sample_space).value;
          continue;
        }
        const double cross = above_zero(i <= j ? matrices.inner[i * count + j] : matrices.inner[j * count + i]);
        value = Ratio(cross, matrices.norm(i), matrices.norm(j)).value;
      }
    }
  };
  if (cheaper_in_sample_space(problem)) {
    const SampleSpace<T> space(matrices, false, threads.workers, memory);
    if (memory.base) find_values(space, true);
  } else {
    const FeatureSpace<T> space(matrices, false, false, memory);
    if (memory.base) find_values(space, false);
  }
  return memory.used;
}

}  // namespace

int64_t linear_cka(CKAProblem& problem, const Threads& threads, void* memory) {
  return problem.wide ? solve<double>(problem, threads, {(char*)memory})
                      : solve<float>(problem, threads, {(char*)memory});
}

int64_t linear_cka_to_kernel(CKAToKernelProblem& problem, const Threads& threads, void* memory) {
  return problem.wide ? solve<double>(problem, threads, {(char*)memory})
                      : solve<float>(problem, threads, {(char*)memory});
}

int64_t linear_cka_pairwise(const CKAPairwiseProblem& problem, const Threads& threads, void* memory) {
  return problem.wide ? solve<double>(problem, threads, {(char*)memory})
                      : solve<float>(problem, threads, {(char*)memory});
}

}  // namespace fedkernels::FEDKERNELS_ISA
