// Everything is products in tiles of gemm.h, on pieces that stay in the cache. With z_1, z_2, .. of the same rows, CKA
// of two is |z_2'z_1|^2 / (|z_1'z_1| |z_2'z_2|). In feature space these products are formed as they stand there,
// [width, width]. In sample space they are the Gram matrices z z', [rows, rows], whose inner products are the same
// numbers. Each problem is solved in the space that takes fewer multiplications.
//
// Products are in T, sums over their entries in double. Symmetric products are formed on and above the diagonal. The
// pieces depend on the sizes alone, and sums over pieces are added in order.
#include "cpu/linear_cka.h"

#include "cpu/memory.h"
#include "cpu/products.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr int64_t DEPTH = TILE_DEPTH;
constexpr int64_t ROWS = 128 / TILE_ROWS * TILE_ROWS;  // of a product that a thread takes at a time
constexpr int64_t MOST_ROWS = 128;                     // of a representation that are looked at at a time, no tile's end
static_assert(DEPTH <= MOST_ROWS && ROWS <= MOST_ROWS);

// ---- the range of float: CKA does not depend on the scale ----

// Squared norms between these do not come from products that overflowed or vanished.
template <class T>
bool ordinary(double norm) {
  return sizeof(T) == 8 ? norm > 1e-200 && norm < 1e200 : norm > 1e-36 && norm < 1e36;
}

// The power of two that brings the largest of `count` entries to [0.5, 1), as far as one can.
template <class T>
double scale_of(const Array& array, int64_t start, int64_t count) {
  double largest = 0;
  T piece[256];
  for (int64_t done = 0; done < count; done += 256) {
    const int64_t size = least(256, count - done);
    widen(piece, array, start + done, size);
    for (int64_t i = 0; i < size; ++i) {
      const double magnitude = __builtin_fabs((double)piece[i]);
      if (magnitude > largest) largest = magnitude;
    }
  }
  if (!(largest > 0 && largest < __builtin_inf())) return 1;
  int exponent;
  __builtin_frexp(largest, &exponent);
  return __builtin_ldexp(1, exponent > 1000 ? -1000 : exponent < -1000 ? 1000 : -exponent);
}

// ---- the value and the factors of its gradient ----

// cross / sqrt(xx yy), and the factors of y(y'x) and x(x'x) in its gradient in x, of y(y'y) in that in y.
struct Ratio {
  bool zero;     // a matrix is zero: value and gradient are 0 by definition, and NaN beside one that is not finite
  double value, of_cross = 0, of_xx = 0, of_yy = 0;

  Ratio(double cross, double xx, double yy) {
    zero = xx == 0 || yy == 0;
    value = 0 * (xx + yy);
    if (zero) return;
    const double norms = __builtin_sqrt(xx) * __builtin_sqrt(yy);
    value = cross / norms;
    const double two = value == value ? 2 : value;  // NaN spreads, also where a factor is infinite
    of_cross = two / norms;
    of_xx = -two * value / xx;
    of_yy = -two * value / yy;
  }
};

// A sum of squares in disguise: below 0 it is rounding.
double above_zero(double cross) { return cross < 0 ? 0 : cross; }

template <class T>
void fill(void* gradient, int64_t count, double value) {
  for (int64_t i = 0; gradient && i < count; ++i) ((T*)gradient)[i] = (T)value;
}

template <class T>
void multiply_by(T* values, int64_t count, double factor) {
  if (factor == 1) return;
  for (int64_t i = 0; i < count; ++i) values[i] = (T)((double)values[i] * factor);
}

// ---- representations ----

// A representation as it enters the products: scaled, and less the centers of its columns.
template <class T>
struct Matrix {
  Array array;
  int64_t start, width, rows;
  double scale;
  T *high, *low;  // [width], a center as a sum of two; null: none

  // `count` rows, followed by as many as a tile may read: as they lie, or in the buffer.
  const T* block(int64_t first, int64_t count, T* buffer) const {
    if (holds<T>(array) && scale == 1 && !high && first + up(count, TILE_ROWS) <= rows) {
      return (const T*)array.data + start + first * width;
    }
    widen(buffer, array, start + first * width, count * width);
    multiply_by(buffer, count * width, scale);
    for (int64_t r = 0; high && r < count; ++r) {
      T* const row = buffer + r * width;
      for (int64_t c = 0; c < width; ++c) row[c] = row[c] - high[c] - low[c];
    }
    for (int64_t i = count * width; i < up(count, TILE_ROWS) * width; ++i) buffer[i] = 0;
    return buffer;
  }
};

// All of a problem, with the inner products that are looked for.
template <class T>
struct Matrices {
  static constexpr int64_t PART = 512;  // rows whose sums are joined

  const Representation* given;
  int64_t count, first, rows;  // the first meet the others, or one another where there are no others
  bool centered;
  int64_t widest = 0, widths = 0;
  Matrix<T>* matrix;
  double* inner;  // [count][count]: |z_j'z_i|^2 for i <= j that meet
  T *high, *low, *buffers;
  double *first_row, *sums;

  Matrices(const Representation* given, int64_t count, int64_t first, int64_t rows, bool centered, int64_t workers,
           Memory& memory)
      : given(given), count(count), first(first), rows(rows), centered(centered) {
    for (int64_t i = 0; i < count; ++i) {
      widths += given[i].width;
      widest = given[i].width > widest ? given[i].width : widest;
    }
    matrix = memory.take<Matrix<T>>(count);
    inner = memory.take<double>(count * count);
    high = memory.take<T>(centered ? widths : 0);
    low = memory.take<T>(centered ? widths : 0);
    first_row = memory.take<double>(centered ? widest : 0);
    sums = memory.take<double>(centered ? up(rows, PART) / PART * widest : 0);
    buffers = memory.take<T>(workers * buffer_size());
    if (!memory.base) return;
    for (int64_t i = 0, at = 0; i < count; at += given[i++].width) {
      T *const of_high = centered ? high + at : nullptr, *const of_low = centered ? low + at : nullptr;
      matrix[i] = {given[i].array, given[i].start, given[i].width, rows, 1, of_high, of_low};
    }
  }

  int64_t buffer_size() const { return up(up(MOST_ROWS, TILE_ROWS) * widest, 16); }
  T* buffer(int64_t worker) const { return buffers + worker * buffer_size(); }

  // Is the product of i <= j wanted?
  bool meet(int64_t i, int64_t j) const { return i == j || first == count || (i < first && j >= first); }
  double norm(int64_t i) const { return inner[i * count + i]; }

  void find_centers(const Threads& threads) const {
    for (int64_t i = 0; centered && i < count; ++i) find_center(matrix[i], threads);
  }

  void find_center(const Matrix<T>& z, const Threads& threads) const {
    const int64_t width = z.width, parts = up(rows, PART) / PART;
    T* const row = buffer(0);
    widen(row, z.array, z.start, width);
    for (int64_t c = 0; c < width; ++c) first_row[c] = (double)row[c] * z.scale;
    // Less the first row, so that the mean of a constant column is that constant.
    for_each(threads, parts, [&](int64_t part, int64_t worker) {
      double* const total = sums + part * width;
      for (int64_t c = 0; c < width; ++c) total[c] = 0;
      for (int64_t r = part * PART; r < least(rows, (part + 1) * PART); ++r) {
        const T* entries = (const T*)z.array.data + z.start + r * width;
        if (!holds<T>(z.array)) {
          widen(buffer(worker), z.array, z.start + r * width, width);
          entries = buffer(worker);
        }
        for (int64_t c = 0; c < width; ++c) total[c] += (double)entries[c] * z.scale - first_row[c];
      }
    });
    for (int64_t c = 0; c < width; ++c) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) total += sums[part * width + c];
      const double center = first_row[c] + total / (double)rows;
      z.high[c] = (T)center;
      z.low[c] = (T)(center - (double)z.high[c]);
    }
  }

  // Scales those whose products are out of range. -> Is there one?
  bool rescale() const {
    bool changed = false;
    for (int64_t i = 0; i < count; ++i) {
      if (ordinary<T>(norm(i))) continue;
      matrix[i].scale = scale_of<T>(given[i].array, given[i].start, rows * given[i].width);
      changed |= matrix[i].scale != 1;
    }
    return changed;
  }
};

// ---- feature space: the products are summed over groups of rows ----

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
        const T* from = matrices.matrix[i].block(first + start, depth, matrices.buffer(worker));
        pack_columns<WIDE>(packed + (block * panels + first_panel[i]) * PANEL, PANEL, from, depth, width(i));
      });
      for_each(threads, pieces, [&](int64_t index, int64_t) {
        multiply_piece(piece[index], first, size);
        if (first + size == rows) squares[index] = finish(piece[index]);
      });
    }
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
      total += twice ? 2 * sum : sum;
      for (int64_t c = 0; twice && whole && c < columns; ++c) {
        for (int64_t r = 0; r < rows; ++r) opposite[c * across + r] = block[r * across + c];
      }
    }
    return total;
  }
};

// ---- sample space: blocks of the Gram matrices of all representations meet while they are in the cache ----

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
    for_each(threads, blocks, [&](int64_t index, int64_t worker) {
      column(blocks - 1 - index, worker, also);  // those with the most work first
    });
    for (int64_t p = 0; p < count * count; ++p) {
      double total = 0;
      for (int64_t j = 0; j < blocks; ++j) total += sums[j * count * count + p];
      matrices.inner[p] = total;
    }
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

// ---- gradients ----

// A whole matrix as the right side of a product over its rows.
template <class T>
struct Packed {
  const Matrices<T>& matrices;
  T* panels;

  Packed(const Matrices<T>& matrices, Memory& memory) : matrices(matrices) {
    panels = memory.take<T>(matrices.rows * up(matrices.widest, TILE_COLUMNS<T>));
  }

  int64_t pitch() const { return matrices.rows * TILE_COLUMNS<T>; }

  void pack(int64_t i, const Threads& threads) const {
    constexpr int64_t WIDE = TILE_COLUMNS<T>;
    const Matrix<T>& z = matrices.matrix[i];
    for_each(threads, up(z.rows, ROWS) / ROWS, [&](int64_t index, int64_t worker) {
      const int64_t first = index * ROWS, count = least(ROWS, z.rows - first);
      const T* rows = z.block(first, count, matrices.buffer(worker));
      pack_columns<WIDE>(panels + first * WIDE, pitch(), rows, count, z.width);
    });
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

// Gradients a y(y'x) + b x(x'x) of feature space.
template <class T>
struct FeatureGradients {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>;

  const Matrices<T>& matrices;
  T* right;  // the two products below each other, in panels of columns

  FeatureGradients(const Matrices<T>& matrices, Memory& memory) : matrices(matrices) {
    right = memory.take<T>(matrices.widths * up(matrices.widest, WIDE));
  }

  // A panel of columns of the product with entries product[k * down + c * across].
  static void weigh(T* out, const T* product, int64_t height, int64_t down, int64_t across, int64_t columns,
                    double by) {
    for (int64_t k = 0; k < height; ++k) {
      for (int64_t c = 0; c < WIDE; ++c) {
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
      multiply(true, z.block(first, count, buffer), z.width, right + before * WIDE, pitch, z.width, target, z.width,
               count, z.width);
      multiply_by(target, count * z.width, z.scale);
    });
  }
};

// ---- the problems ----

template <class T>
int64_t solve(CKAProblem& problem, const Threads& threads, Memory memory) {
  const Representation both[] = {problem.x, problem.y};
  const int64_t rows = problem.rows, x_width = problem.x.width, y_width = problem.y.width;
  const Matrices<T> matrices(both, 2, 1, rows, problem.centered, threads.workers, memory);
  const auto find_value = [&](const auto& space) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      matrices.find_centers(threads);
      space.run(threads);
      if (!matrices.rescale()) break;
    }
    const Ratio found(above_zero(matrices.inner[1]), matrices.norm(0), matrices.norm(1));
    problem.value = found.value;
    if (found.zero || found.value == 0) {
      fill<T>(problem.x_gradient, rows * x_width, found.value);
      fill<T>(problem.y_gradient, rows * y_width, found.value);
    }
    return found;
  };

  if (rows < x_width + y_width) {
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
    if (by.zero || by.value == 0) return memory.used;
    form(0, by.of_xx, problem.x_gradient);
    form(1, by.of_yy, problem.y_gradient);
    return memory.used;
  }
  const FeatureSpace<T> space(matrices, problem.x_gradient, problem.y_gradient, memory);
  const FeatureGradients<T> formed(matrices, memory);
  if (!memory.base) return memory.used;
  const Ratio by = find_value(space);
  if (by.zero || by.value == 0) return memory.used;
  const T *xx = space.product[0].out, *cross = space.product[1].out, *yy = space.product[2].out;
  formed.run(0, 1, cross, x_width, 1, by.of_cross, xx, by.of_xx, problem.x_gradient, threads);
  formed.run(1, 0, cross, 1, x_width, by.of_cross, yy, by.of_yy, problem.y_gradient, threads);
  return memory.used;
}

// A kernel as it enters the products: scaled, and HKH where it is centered.
template <class T>
struct Kernel {
  const Representation& given;
  int64_t rows, blocks;
  bool centered;
  double scale = 1;
  double *row_center, *column_center;         // (HKH)_ij = K_ij - row_center_i - column_center_j
  double *first_row, *row_sums, *column_sums;  // [rows], [rows] and [blocks][rows]
  T* buffers;                                  // of the workers, one row for each

  Kernel(const CKAToKernelProblem& problem, int64_t workers, Memory& memory)
      : given(problem.kernel), rows(problem.rows), blocks(up(rows, ROWS) / ROWS), centered(problem.centered) {
    const int64_t count = centered ? rows : 0;
    row_center = memory.take<double>(count);
    column_center = memory.take<double>(count);
    first_row = memory.take<double>(count);
    row_sums = memory.take<double>(count);
    column_sums = memory.take<double>(blocks * count);
    buffers = memory.take<T>(workers * up(count, 16));
  }

  // `count` entries of row i from column j on. -> Their squared norm.
  double read(T* out, int64_t i, int64_t j, int64_t count) const {
    widen(out, given.array, given.start + i * rows + j, count);
    if (centered) {
      const double own = row_center[i], *const of_columns = column_center + j;
      for (int64_t c = 0; c < count; ++c) out[c] = (T)((double)out[c] * scale - own - of_columns[c]);
    } else {
      multiply_by(out, count, scale);
    }
    return inner(out, out, count);
  }

  // The sums are of K_ij - K_0j - K_i0 + K_00, in which a constant kernel is 0 to the last bit.
  void find_centers(const Threads& threads) const {
    if (!centered) return;
    widen(buffers, given.array, given.start, rows);
    for (int64_t j = 0; j < rows; ++j) first_row[j] = (double)buffers[j] * scale;
    for_each(threads, blocks, [&](int64_t block, int64_t worker) {
      double* const totals = column_sums + block * rows;
      T* const row = buffers + worker * up(rows, 16);
      for (int64_t j = 0; j < rows; ++j) totals[j] = 0;
      for (int64_t i = block * ROWS; i < least(rows, (block + 1) * ROWS); ++i) {
        widen(row, given.array, given.start + i * rows, rows);
        row_center[i] = (double)row[0] * scale - first_row[0];
        row_sums[i] = add_row(row, row_center[i], totals);
      }
    });
    double total = 0;
    for (int64_t i = 0; i < rows; ++i) total += row_sums[i];
    const double mean = total / (double)rows / (double)rows;
    for (int64_t i = 0; i < rows; ++i) row_center[i] += row_sums[i] / (double)rows - mean;
    for (int64_t j = 0; j < rows; ++j) {
      double sum = 0;
      for (int64_t block = 0; block < blocks; ++block) sum += column_sums[block * rows + j];
      column_center[j] = first_row[j] + sum / (double)rows;
    }
  }

  double add_row(const T* entries, double own, double* totals) const {
    Vec together{};
    int64_t j = 0;
    for (; j + LANES <= rows; j += LANES) {
      const Vec entry = to_double(entries + j) * scale - load(first_row + j) - own;
      store(totals + j, load(totals + j) + entry);
      together += entry;
    }
    double all = sum(together);
    for (; j < rows; ++j) {
      const double entry = (double)entries[j] * scale - first_row[j] - own;
      totals[j] += entry;
      all += entry;
    }
    return all;
  }

  bool rescale(double norm) {
    if (ordinary<T>(norm)) return false;
    scale = scale_of<T>(given.array, given.start, rows * rows);
    return scale != 1;
  }
};

// tr(x'Kx) and |K|^2 as sums over blocks.
struct KernelSums {
  double *of_blocks, trace = 0, norm = 0;

  void join(int64_t blocks) {
    trace = norm = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      trace += of_blocks[2 * i];
      norm += of_blocks[2 * i + 1];
    }
  }
};

template <class T>
int64_t solve(CKAToKernelProblem& problem, const Threads& threads, Memory memory) {
  const int64_t rows = problem.rows, width = problem.x.width, workers = threads.workers;
  T* const gradient = (T*)problem.gradient;
  const Matrices<T> matrices(&problem.x, 1, 1, rows, problem.centered, workers, memory);
  Kernel<T> kernel(problem, workers, memory);
  KernelSums sums{memory.take<double>(2 * up(rows, TILE_ROWS))};
  const auto find_value = [&](const auto& products) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      matrices.find_centers(threads);
      kernel.find_centers(threads);
      products();
      if (!(matrices.rescale() | kernel.rescale(sums.norm))) break;
    }
    const Ratio found(sums.trace, matrices.norm(0), sums.norm);
    problem.value = found.value;
    if (found.zero) fill<T>(gradient, rows * width, found.value);
    return found;
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
  const Matrices<T> matrices(problem.representations, count, first, problem.rows, problem.centered, threads.workers,
                             memory);
  const auto find_values = [&](const auto& space) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      matrices.find_centers(threads);
      space.run(threads);
      if (!matrices.rescale()) break;
    }
    const int64_t others = first == count ? 0 : first;
    for (int64_t i = 0; i < first; ++i) {
      for (int64_t j = others; j < count; ++j) {
        const double cross = above_zero(i <= j ? matrices.inner[i * count + j] : matrices.inner[j * count + i]);
        problem.values[i * (count - others) + j - others] = Ratio(cross, matrices.norm(i), matrices.norm(j)).value;
      }
    }
  };
  if (cheaper_in_sample_space(problem)) {
    const SampleSpace<T> space(matrices, false, threads.workers, memory);
    if (memory.base) find_values(space);
  } else {
    const FeatureSpace<T> space(matrices, false, false, memory);
    if (memory.base) find_values(space);
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
