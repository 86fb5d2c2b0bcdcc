// Linear CKA in sample space: the Gram matrices xx' and yy', [rows, rows], whose inner products are the same numbers as
// in feature space. Blocks of the Gram matrices of all representations meet while they are in the cache.
#pragma once

#include "cpu/linear_cka_debiased.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

template <class T>
struct SampleSpace {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>, SLICE = 2048;

  const Matrices<T>& matrices;
  int64_t size, blocks;  // size: rows and columns of a block
  T* whole;              // [count][rows][rows], the Gram matrices; null: not kept
  T *packed, *grams;     // of the workers, one behind another
  double* sums;          // [blocks][count][count]

  SampleSpace(const Matrices<T>& matrices, bool kept, int64_t workers, Memory& memory) : matrices(matrices) {
    const int64_t rows = matrices.rows, count = matrices.count;
    size = least(up(up(rows, 8) / 8, WIDE), MOST_ROWS);
    blocks = up(rows, size) / size;
    whole = kept ? memory.take<T>(count * rows * rows) : nullptr;
    workers = least(workers, blocks);  // no more have something to do
    packed = memory.take<T>(workers * packed_room());
    grams = memory.take<T>(workers * count * gram_room());
    sums = memory.take<double>(blocks * count * count);
  }

  int64_t packed_room() const { return size * matrices.widths; }
  int64_t gram_room() const { return up(size, TILE_ROWS) * size; }
  int64_t rows_of(int64_t block) const { return least(size, matrices.rows - block * size); }
  const T* gram(int64_t i) const { return whole + i * matrices.rows * matrices.rows; }

  void run(const Threads& threads) const {
    run(threads, [](int64_t, int64_t, const T*, int64_t, int64_t) {});
  }

  // also(i, j, gram, pitch, worker): what else is done with block (i, j) of the first Gram matrix, i <= j. All of one j
  // come in order on one thread.
  template <class Also>
  void run(const Threads& threads, const Also& also) const {
    const int64_t count = matrices.count;
    if (matrices.debiased) find_row_norms(threads);  // which U-centring asks for
    for_each(threads, blocks, [&](int64_t index, int64_t worker) {
      column(blocks - 1 - index, worker, also);  // those with the most work first
    });
    for (int64_t p = 0; p < count * count; ++p) {
      double total = 0;
      for (int64_t j = 0; j < blocks; ++j) total += sums[j * count * count + p];
      matrices.inner[p] = total;
    }
  }

  void find_row_norms(const Threads& threads) const {
    for_each(threads, blocks * matrices.count, [&](int64_t index, int64_t worker) {
      const int64_t block = index / matrices.count, i = index % matrices.count, start = block * size;
      const T* const of_z = matrices.matrix[i].block(start, rows_of(block), matrices.buffer(worker));
      matrices.find_row_norms(i, start, rows_of(block), of_z);
    });
    matrices.find_traces();
  }

  template <class Also>
  void column(int64_t j, int64_t worker, const Also& also) const {
    const int64_t count = matrices.count, columns = rows_of(j), pitch = up(columns, WIDE);
    T* const own = packed + worker * packed_room();
    T* const of_worker = grams + worker * count * gram_room();
    double* const totals = sums + j * count * count;
    for (int64_t p = 0, at = 0; p < count; at += matrices.matrix[p++].width * pitch) {
      const T* rows = matrices.matrix[p].block(j * size, columns, matrices.buffer(worker));
      pack_rows(own + at, rows, columns, matrices.matrix[p].width);
    }
    for (int64_t p = 0; p < count * count; ++p) totals[p] = 0;
    for (int64_t i = 0; i <= j; ++i) {
      const int64_t rows = rows_of(i);
      for (int64_t p = 0, at = 0; p < count; at += matrices.matrix[p++].width * pitch) {
        const int64_t width = matrices.matrix[p].width;
        const T* left = matrices.matrix[p].block(i * size, rows, matrices.buffer(worker));
        T* const out = of_worker + p * gram_room();
        multiply(false, left, width, own + at, width * WIDE, width, out, pitch, up(rows, TILE_ROWS), pitch);
        if (matrices.debiased) {
          u_center(matrices, p, i * size, rows, j * size, columns, out, pitch);
        }
        if (whole) keep(whole + p * matrices.rows * matrices.rows, i, j, out, pitch);
      }
      join(of_worker, rows * pitch, i < j ? 2 : 1, totals);
      also(i, j, of_worker, pitch, worker);
    }
  }

  void keep(T* target, int64_t i, int64_t j, const T* block, int64_t pitch) const {
    const int64_t rows = matrices.rows;
    for (int64_t r = 0; r < rows_of(i); ++r) {
      T* const row = target + (i * size + r) * rows + j * size;
      for (int64_t c = 0; c < rows_of(j); ++c) row[c] = block[r * pitch + c];
    }
    for (int64_t c = 0; i < j && c < rows_of(j); ++c) {
      T* const row = target + (j * size + c) * rows + i * size;
      for (int64_t r = 0; r < rows_of(i); ++r) row[r] = block[r * pitch + c];
    }
  }

  // totals[p * count + q] += by <gram_p, gram_q> where p <= q meet.
  void join(const T* blocks_of, int64_t entries, double by, double* totals) const {
    const int64_t count = matrices.count, first = matrices.first, room = gram_room();
    const bool others = first < count;
    for (int64_t start = 0; start < entries; start += SLICE) {
      const int64_t length = least(SLICE, entries - start);
      const T* const at = blocks_of + start;
      const auto one = [&](int64_t p, int64_t q) {
        totals[p * count + q] += by * inner(at + p * room, at + q * room, length);
      };
      for (int64_t p = 0; others && p < count; ++p) one(p, p);
      for (int64_t p = 0; p < first; p += 4) {
        for (int64_t q = others ? first : p; q < count; q += 4) {
          if (p + 4 <= first && q + 4 <= count) {
            inner_of_fours(at + p * room, at + q * room, room, length, by, totals + p * count + q, count);
            continue;
          }
          for (int64_t a = p; a < least(p + 4, first); ++a) {
            for (int64_t b = a > q ? a : q; b < least(q + 4, count); ++b) one(a, b);
          }
        }
      }
    }
  }
};

// Gradients M z of sample space, for symmetric [rows, rows] matrices M.
template <class T>
struct SampleGradients {
  const Matrices<T>& matrices;
  Packed<T> packed;
  T* left;  // of the workers, one behind another

  SampleGradients(const Matrices<T>& matrices, int64_t workers, Memory& memory)
      : matrices(matrices), packed(matrices, memory) {
    left = memory.take<T>(workers * ROWS * matrices.rows);
  }

  // fill(r, out): row r of M.
  template <class Fill>
  void run(int64_t i, void* gradient, const Threads& threads, const Fill& fill) const {
    if (!gradient) return;
    const Matrix<T>& z = matrices.matrix[i];
    packed.pack(i, threads);
    for_each(threads, up(z.rows, ROWS) / ROWS, [&](int64_t index, int64_t worker) {
      const int64_t first = index * ROWS, count = least(ROWS, z.rows - first);
      T* const own = left + worker * ROWS * z.rows;
      T* const target = (T*)gradient + first * z.width;
      for (int64_t r = 0; r < count; ++r) fill(first + r, own + r * z.rows);
      multiply(false, own, z.rows, packed.panels, packed.pitch(), z.rows, target, z.width, count, z.width);
      multiply_by(target, count * z.width, z.scale);
    });
  }
};

}  // namespace

}  // namespace fedkernels::FEDKERNELS_ISA
