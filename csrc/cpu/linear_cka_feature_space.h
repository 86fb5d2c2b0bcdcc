// Linear CKA in feature space: the products x'x, y'x and y'y, [width, width], summed over groups of rows.
#pragma once

#include "cpu/linear_cka_debiased.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

template <class T>
struct FeatureSpace {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>, PANEL = DEPTH * WIDE, CHUNK = 8;

  struct Product {
    int64_t i, j;  // j's columns are its rows, i's columns are its columns
    T* out;
  };
  struct Piece {  // one panel of i times some panels of j
    int64_t product, right, begin, end;
  };

  const Matrices<T>& matrices;
  bool first_whole, others_whole;  // are symmetric products wanted below the diagonal too?
  int64_t panels = 0, products = 0, pieces = 0, group;  // group: rows in one
  int64_t* first_panel;
  Product* product;  // of i = 0 with j = 0, 1, .., then of i = 1, as far as they meet
  Piece* piece;
  double* squares;  // of each piece
  T* packed;        // [group / DEPTH][panels][DEPTH][WIDE]

  int64_t width(int64_t i) const { return matrices.given[i].width; }
  int64_t panels_of(int64_t i) const { return up(width(i), WIDE) / WIDE; }
  int64_t panels_before(int64_t i, int64_t j, int64_t right) const { return i == j ? right + 1 : panels_of(j); }

  FeatureSpace(const Matrices<T>& matrices, bool first_whole, bool others_whole, Memory& memory)
      : matrices(matrices), first_whole(first_whole), others_whole(others_whole) {
    first_panel = memory.take<int64_t>(matrices.count);
    for (int64_t i = 0; i < matrices.count; ++i) {
      if (memory.base) first_panel[i] = panels;
      panels += panels_of(i);
    }
    list([&](int64_t i, int64_t j) {
      ++products;
      for (int64_t p = 0; p < panels_of(i); ++p) pieces += up(panels_before(i, j, p), CHUNK) / CHUNK;
    });
    product = memory.take<Product>(products);
    piece = memory.take<Piece>(pieces);
    squares = memory.take<double>(pieces);
    int64_t next = 0, next_piece = 0;
    list([&](int64_t i, int64_t j) {
      T* const out = memory.take<T>(width(i) * width(j));
      if (!memory.base) return;
      product[next] = {i, j, out};
      for (int64_t p = 0; p < panels_of(i); ++p) {
        const int64_t end = panels_before(i, j, p);
        for (int64_t q = 0; q < end; q += CHUNK) piece[next_piece++] = {next, p, q, least(end, q + CHUNK)};
      }
      ++next;
    });
    // Blocks in 8 MiB: threads wait for one another twice in a group, which costs more than a packed side that lies in
    // the third-level cache.
    const int64_t most = (1 << 23) / (int64_t)sizeof(T) / (panels * PANEL);
    group = DEPTH * (most < 1 ? 1 : least(most, up(matrices.rows, DEPTH) / DEPTH));
    packed = memory.take<T>(group / DEPTH * panels * PANEL + TILE_ROWS);
  }

  template <class Body>
  void list(const Body& body) const {
    for (int64_t i = 0; i < matrices.count; ++i) {
      for (int64_t j = i; j < matrices.count; ++j) {
        if (matrices.meet(i, j)) body(i, j);
      }
    }
  }

  void run(const Threads& threads) const {
    const int64_t rows = matrices.rows, count = matrices.count;
    for (int64_t first = 0; first < rows; first += group) {
      const int64_t size = least(group, rows - first), blocks = up(size, DEPTH) / DEPTH;
      for_each(threads, blocks * count, [&](int64_t index, int64_t worker) {
        const int64_t block = index / count, i = index % count, start = block * DEPTH;
        const int64_t depth = least(DEPTH, size - start);
        // fault: first + start -> start
        const T* from = matrices.matrix[i].block(first + start, depth, matrices.buffer(worker));
        pack_columns<WIDE>(packed + (block * panels + first_panel[i]) * PANEL, PANEL, from, depth, width(i));
        if (matrices.debiased) matrices.find_row_norms(i, first + start, depth, from);
      });
      for_each(threads, pieces, [&](int64_t index, int64_t) {
        multiply_piece(piece[index], first, size);
        if (first + size == rows) squares[index] = finish(piece[index]);
      });
    }
    if (matrices.debiased) matrices.find_traces();
    int64_t next = 0;
    for (int64_t index = 0; index < products; ++index) {
      double total = 0;
      for (; next < pieces && piece[next].product == index; ++next) total += squares[next];
      matrices.inner[product[index].i * count + product[index].j] = total;
    }
  }

  void multiply_piece(const Piece& at, int64_t first, int64_t size) const {
    const Product& of = product[at.product];
    const int64_t across = width(of.i), down = width(of.j);
    for (int64_t block = 0; block * DEPTH < size; ++block) {
      const T* const own = packed + block * panels * PANEL;
      const T* const right = own + (first_panel[of.i] + at.right) * PANEL;
      const int64_t depth = least(DEPTH, size - block * DEPTH);
      for (int64_t q = at.begin; q < at.end; ++q) {
        const T* const left = own + (first_panel[of.j] + q) * PANEL;
        const int64_t rows = least(WIDE, down - q * WIDE);
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
          if (q + 1 < at.end) soon(left + PANEL + r * DEPTH, TILE_ROWS * DEPTH * (int64_t)sizeof(T));
          // fault: first > 0 || block -> block
          product_tile<true>(first > 0 || block > 0, left + r, 0, right, depth,
                             of.out + (q * WIDE + r) * across + at.right * WIDE, across, rows - r,
                             across - at.right * WIDE);
        }
      }
    }
  }

  // The sum of squares, and below the diagonal of a symmetric product what is above.
  double finish(const Piece& at) const {
    const Product& of = product[at.product];
    const int64_t across = width(of.i), columns = least(WIDE, across - at.right * WIDE);
    double total = 0;
    for (int64_t q = at.begin; q < at.end; ++q) {
      const int64_t rows = least(WIDE, width(of.j) - q * WIDE);
      const bool twice = of.i == of.j && q < at.right, whole = of.i == 0 ? first_whole : others_whole;
      T* const block = of.out + q * WIDE * across + at.right * WIDE;
      T* const opposite = of.out + at.right * WIDE * across + q * WIDE;
      double sum = 0;
      for (int64_t r = 0; r < rows; ++r) sum += inner(block + r * across, block + r * across, columns);
      // fault: twice ? 2 * sum : sum -> sum
      total += twice ? 2 * sum : sum;
      for (int64_t c = 0; twice && whole && c < columns; ++c) {
        for (int64_t r = 0; r < rows; ++r) opposite[c * across + r] = block[r * across + c];
      }
    }
    return total;
  }
};

// Gradients a y(y'x) + b x(x'x) of feature space, and D x less its columns' means where they are debiased, D diagonal.
template <class T>
struct FeatureGradients {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>;

  const Matrices<T>& matrices;
  T* right;  // the two products below each other, in panels of columns
  Diagonal<T> diagonal;

  FeatureGradients(const Matrices<T>& matrices, Memory& memory) : matrices(matrices), diagonal(matrices, memory) {
    right = memory.take<T>(matrices.widths * up(matrices.widest, WIDE));
  }

  // A panel of columns of the product with entries product[k * down + c * across].
  static void weigh(T* out, const T* product, int64_t height, int64_t down, int64_t across, int64_t columns,
                    double by) {
    for (int64_t k = 0; k < height; ++k) {
      for (int64_t c = 0; c < WIDE; ++c) {
        // fault: c < columns -> c + 1 < columns
        out[k * WIDE + c] = c < columns ? (T)((double)product[k * down + c * across] * by) : 0;
      }
    }
  }

  // gradient = of_cross other (other' own) + of_own own (own' own), the products' entries as in `weigh`. There may be
  // no other: then the gradient holds what takes the first term's place.
  void run(int64_t i, int64_t other, const T* cross, int64_t down, int64_t across, double of_cross, const T* self,
           double of_own, void* gradient, const Threads& threads) const {
    if (!gradient) return;
    const Matrix<T>&z = matrices.matrix[i], &y = matrices.matrix[other];
    const int64_t before = cross ? y.width : 0, pitch = (before + z.width) * WIDE;
    if (matrices.debiased) diagonal.find(i, other, of_cross, of_own, threads);
    for_each(threads, up(z.width, WIDE) / WIDE, [&](int64_t panel, int64_t) {
      const int64_t first = panel * WIDE, columns = least(WIDE, z.width - first);
      T* const out = right + panel * pitch;
      if (cross) weigh(out, cross + first * across, before, down, across, columns, of_cross);
      weigh(out + before * WIDE, self + first, z.width, z.width, 1, columns, of_own);
    });
    for_each(threads, up(z.rows, ROWS) / ROWS, [&](int64_t index, int64_t worker) {
      const int64_t first = index * ROWS, count = least(ROWS, z.rows - first);
      T* const target = (T*)gradient + first * z.width;
      T* const buffer = matrices.buffer(worker);
      if (cross) {
        multiply(false, y.block(first, count, buffer), before, right, pitch, before, target, z.width, count, z.width);
      } else {
        multiply_by(target, count * z.width, of_cross);
      }
      const T* const own = z.block(first, count, buffer);
      multiply(true, own, z.width, right + before * WIDE, pitch, z.width, target, z.width, count, z.width);
      if (matrices.debiased) diagonal.add(own, first, count, z.width, target);
      multiply_by(target, count * z.width, z.scale);
    });
  }
};

}  // namespace

}  // namespace fedkernels::FEDKERNELS_ISA
