// Products of representations and of kernels that linear CKA consists of, and its gradients.
//
// With z_1, z_2, .. of the same rows, CKA of two is |z_2'z_1|^2 / (|z_1'z_1| |z_2'z_2|). In feature space these products
// are formed as they stand there, [width, width]. In sample space they are the Gram matrices z z', [rows, rows], whose
// inner products are the same numbers.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"
#include "cpu/tasks.h"

namespace fedkernels {

struct Representation {  // [rows, width], from entry `start` of the array on
  Array array;
  int64_t start, width;
  double scale;    // power of two by which its entries are multiplied
  double* center;  // [width]: what is subtracted from the columns afterwards; null: nothing
};

// Scales and centers are found along with the products. `first` counts the representations that meet all others, or
// one another where there are no others. Norms are squared, sums over products: all are of the scaled representations.
struct CKAProducts {
  Representation* matrices;
  int64_t count, first, rows;
  bool wide;          // arithmetic and kept products in double, else in float
  bool sample_space;
  double* norms;      // [count]: |z'z|^2
  double* cross;      // [first, count - first], or [first, first]: |z_j'z_i|^2
  void* kept_cross;   // of one with one other in feature space: [its width, width], or null
  void** kept_norms;  // each product with itself, or null
};

struct CKAGradients {
  Representation x, y;
  int64_t rows;
  bool wide, sample_space;
  const void *cross, *xx, *yy;  // kept products; cross in feature space only
  double of_cross, of_xx, of_yy;  // factors: the gradient in x is of_cross y(y'x) + of_xx x(x'x)
  void *x_gradient, *y_gradient;  // [rows, width], or null
};

// tr(x'Kx), |x'x|^2 and |K|^2 for K [rows, rows]. In sample space tr(x'Kx) is <K, xx'>.
struct KernelProducts {
  Representation x;
  Array kernel;
  int64_t kernel_start, rows;
  double kernel_scale;
  double *row_center, *column_center;  // [rows]: what is subtracted from the scaled rows and columns; null: nothing
  bool wide, sample_space;
  double trace, x_norm, kernel_norm;
  void* product;  // Kx, [rows, width], in feature space only
  void* xx;       // x'x or xx', or null
};

struct KernelGradient {
  KernelProducts products;
  double of_kernel, of_xx;  // the gradient is of_kernel Kx + of_xx x(x'x)
  void* gradient;
};

}  // namespace fedkernels

// -> The bytes of memory, aligned to 64, that a computation wants. Without memory that is all that these do.
FEDKERNELS_DECLARE(cka_products, int64_t, const CKAProducts& problem, const Threads& threads, void* memory)
FEDKERNELS_DECLARE(cka_gradients, int64_t, const CKAGradients& problem, const Threads& threads, void* memory)
FEDKERNELS_DECLARE(kernel_products, int64_t, KernelProducts& problem, const Threads& threads, void* memory)
FEDKERNELS_DECLARE(kernel_gradient, int64_t, const KernelGradient& problem, const Threads& threads, void* memory)
