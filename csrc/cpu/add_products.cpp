// Products z_i'z_j over the rows of a block, in tiles of gemm.h, added to sums in double.
//
// Columns are packed into panels once for all products. A piece is some panels of z_i times some of z_j. It goes
// through the rows, TILE_DEPTH at a time. The products of TILE_DEPTH rows are summed in T and added up in T, the sums
// of the whole block in double. A piece's sums lie side by side in the second-level cache meanwhile: rows of the whole
// product would compete for the same places there where the width is a power of two. A product of z_i with itself is
// formed on and above the diagonal. Sums of weighted rows are products with one matrix more, whose columns are the
// weights. Norms are divided by the largest there, since the cubes of entries may be out of float's range where their
// squares are in it.
#include "cpu/add_products.h"

#include "cpu/memory.h"
#include "cpu/products.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

template <class T>
struct Products {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>, PANEL = TILE_DEPTH * WIDE;
  static constexpr int64_t DOWN = 256 / WIDE, ACROSS = 64 / WIDE;  // panels of a piece

  struct Given {  // a representation, or last the weights
    int64_t width, panels, column, panel;  // column, panel: the first
  };
  struct Piece {  // z_i's panels from `down` on are its rows, z_j's panels from `across` on its columns
    int64_t i, j, down, across;
    double* sums;  // of the whole product
    int64_t pitch;
  };

  const ProductsProblem& problem;
  int64_t count, panels = 0, pieces = 0, blocks;
  Given* given;
  Piece* piece;
  double* largest;  // norm of each representation
  T* packed;        // [blocks][panels][TILE_DEPTH][WIDE]
  T* formed;        // [workers][ACROSS][DOWN][WIDE][WIDE], sums of a piece

  Products(const ProductsProblem& problem, int64_t workers, Memory& memory)
      : problem(problem), count(problem.count), blocks(up(problem.rows, TILE_DEPTH) / TILE_DEPTH) {
    given = memory.take<Given>(count + 1);
    largest = memory.take<double>(count + 1);
    for (int64_t i = 0, column = 0; i <= count; column += width_of(i++)) {
      if (memory.base) given[i] = {width_of(i), panels_of(i), column, panels};
      panels += panels_of(i);
    }
    list([&](const Piece&) { ++pieces; });
    piece = memory.take<Piece>(pieces);
    packed = memory.take<T>(blocks * panels * PANEL + TILE_ROWS);
    formed = memory.take<T>(workers * ACROSS * DOWN * WIDE * WIDE);
    if (!memory.base) return;
    int64_t next = 0;
    list([&](const Piece& one) { piece[next++] = one; });
  }

  int64_t width_of(int64_t i) const { return i < count ? problem.widths[i] : count + 1; }
  int64_t panels_of(int64_t i) const { return up(width_of(i), WIDE) / WIDE; }
  T* packed_of(int64_t block, int64_t panel) const { return packed + (block * panels + panel) * PANEL; }
  // fault: block * TILE_DEPTH) -> block * TILE_DEPTH - 1)
  int64_t depth_of(int64_t block) const { return least(TILE_DEPTH, problem.rows - block * TILE_DEPTH); }

  template <class Body>
  void list(const Body& body) const {
    int64_t pitch = 0, row = 0, column = 0;
    for (int64_t j = problem.first; j < count; ++j) pitch += width_of(j);
    for (int64_t i = 0; i < problem.first; row += width_of(i++)) {
      double* sums = problem.cross + row * pitch;
      for (int64_t j = problem.first; j < count; sums += width_of(j++)) list(i, j, sums, pitch, body);
    }
    for (int64_t i = 0; i < count; column += width_of(i++)) {
      list(i, i, problem.own[i], width_of(i), body);
      list(count, i, problem.weighted + column, problem.columns, body);
    }
  }

  template <class Body>
  void list(int64_t i, int64_t j, double* sums, int64_t pitch, const Body& body) const {
    for (int64_t across = 0; across < panels_of(j); across += ACROSS) {
      for (int64_t down = 0; down < panels_of(i) && (i != j || down < across + ACROSS); down += DOWN) {
        body({i, j, down, across, sums, pitch});
      }
    }
  }

  void run(const Threads& threads) const {
    for_each(threads, blocks * count, [&](int64_t index, int64_t) { pack(index / count, index % count); });
    for (int64_t i = 0; i <= count; ++i) {
      largest[i] = i < count ? largest_of(problem.norms + i * problem.rows) : 1;
      for (int64_t c = 0; c < problem.columns; ++c) problem.weighted[i * problem.columns + c] = 0;
    }
    for_each(threads, blocks, [&](int64_t block, int64_t) { pack_weights(block); });
    for_each(threads, blocks > 0 ? pieces : 0, [&](int64_t index, int64_t worker) {
      T* const sums = formed + worker * ACROSS * DOWN * WIDE * WIDE;
      for (int64_t block = 0; block < blocks; ++block) multiply(piece[index], block, sums);
    });
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = 0; c < problem.columns; ++c) problem.weighted[i * problem.columns + c] *= largest[i];
    }
  }

  void pack(int64_t block, int64_t i) const {
    const int64_t start = block * TILE_DEPTH, depth = depth_of(block);
    const T* const from = (const T*)problem.block + start * problem.columns + given[i].column;
    pack_columns<WIDE>(packed_of(block, given[i].panel), PANEL, from, depth, given[i].width, problem.columns);
    for (int64_t r = 0; r < depth; ++r) {
      const T* const row = from + r * problem.columns;
      problem.norms[i * problem.rows + start + r] = inner(row, row, given[i].width);
    }
  }

  double largest_of(const double* norms) const {
    double most = 0;
    for (int64_t r = 0; r < problem.rows; ++r) most = norms[r] > most ? norms[r] : most;
    return most > 0 ? most : 1;
  }

  void pack_weights(int64_t block) const {
    for (int64_t i = 0; i < given[count].panels * WIDE; ++i) {
      T* const out = packed_of(block, given[count].panel + i / WIDE) + i % WIDE;
      const double* const norms = problem.norms + i * problem.rows + block * TILE_DEPTH;
      for (int64_t r = 0; r < depth_of(block); ++r) {
        out[r * WIDE] = i < count ? (T)(norms[r] / largest[i]) : i == count ? (T)1 : (T)0;
      }
    }
  }

  // The rows of a block, on and above the diagonal. The last block's tiles go on to the sums of the whole product.
  void multiply(const Piece& at, int64_t block, T* sums) const {
    const Given &z = given[at.i], &y = given[at.j];
    const int64_t across_end = least(at.across + ACROSS, y.panels), down_end = least(at.down + DOWN, z.panels);
    for (int64_t p = at.across; p < across_end; ++p) {
      const T* const right = packed_of(block, y.panel + p);
      // fault: p + 1) -> p)
      const int64_t end = at.i == at.j ? least(down_end, p + 1) : down_end, columns = least(WIDE, y.width - p * WIDE);
      for (int64_t q = at.down; q < end; ++q) {
        const T* const left = packed_of(block, z.panel + q);
        const int64_t rows = least(WIDE, z.width - q * WIDE);
        T* const of_panels = sums + ((p - at.across) * DOWN + q - at.down) * WIDE * WIDE;
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
          double* const target = at.sums + (q * WIDE + r) * at.pitch + p * WIDE;
          const int64_t last = block + 1 == blocks ? least(TILE_ROWS, rows - r) : 0;
          for (int64_t i = 0; i < last; ++i) soon(target + i * at.pitch, columns * (int64_t)sizeof(double));
          T* const of_tile = of_panels + r * WIDE;
          product_tile<true>(block > 0, left + r, 0, right, depth_of(block), of_tile, WIDE, WIDE - r, WIDE);
          for (int64_t i = 0; i < last; ++i) {
            for (int64_t c = 0; c < columns; ++c) target[i * at.pitch + c] += of_panels[(r + i) * WIDE + c];
          }
        }
      }
    }
  }
};

template <class T>
int64_t add(const ProductsProblem& problem, const Threads& threads, Memory memory) {
  const Products<T> products(problem, threads.workers, memory);
  if (memory.base) products.run(threads);
  return memory.used;
}

}  // namespace

int64_t add_products(const ProductsProblem& problem, const Threads& threads, void* memory) {
  return problem.wide ? add<double>(problem, threads, {(char*)memory}) : add<float>(problem, threads, {(char*)memory});
}

}  // namespace fedkernels::FEDKERNELS_ISA
