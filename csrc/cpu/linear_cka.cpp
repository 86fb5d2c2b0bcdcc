// Everything is products in tiles of gemm.h, on pieces that stay in the cache. Products are in T, their norms are summed
// in double. Symmetric products are formed on and above the diagonal, in blocks, and only what the gradients need of them
// is kept. The pieces depend on the sizes alone, and sums over pieces are added in order.
#include "cpu/linear_cka.h"

#include "cpu/gemm.h"
#include "cpu/memory.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

#ifndef DEPTH_
#define DEPTH_ 256
#endif
constexpr int64_t DEPTH = DEPTH_ / TILE_ROWS * TILE_ROWS;
#ifndef ROWS_
#define ROWS_ 128
#endif
#ifndef GROUP_
#define GROUP_ 20
#endif
constexpr int64_t ROWS = ROWS_ / TILE_ROWS * TILE_ROWS;  // of a product that a thread takes at a time

// Squared norms between these do not come from products that overflowed or vanished.
template <class T>
static inline bool ordinary(double norm) {
  return sizeof(T) == 8 ? norm > 1e-200 && norm < 1e200 : norm > 1e-36 && norm < 1e36;
}

// The power of two that brings the largest entry to [0.5, 1), as far as one can.
double scale_of(double largest) {
  if (!(largest > 0 && largest < __builtin_inf())) return 1;
  int exponent;
  __builtin_frexp(largest, &exponent);
  return __builtin_ldexp(1, exponent > 1000 ? -1000 : exponent < -1000 ? 1000 : -exponent);
}

template <class T>
double largest_of(const Array& array, int64_t start, int64_t count) {
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
  return largest;
}

// Sums in double.

typedef float HalfVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
static inline Vec to_double(const float* p) { return __builtin_convertvector(*(const HalfVec*)p, Vec); }
static inline Vec to_double(const double* p) { return load(p); }

template <class T>
double inner(const T* p, const T* q, int64_t count) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES) {
    for (int v = 0; v < 4; ++v) sums[v] += to_double(p + i + v * LANES) * to_double(q + i + v * LANES);
  }
  double total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) total += (double)p[i] * (double)q[i];
  return total;
}

// sums[a * pitch + b] += by <p_a, q_b> for four arrays p_a and four q_b, `apart` entries from one to the next.
template <class T>
void inner_of_fours(const T* p, const T* q, int64_t apart, int64_t count, double by, double* sums, int64_t pitch) {
  Vec totals[4][4] = {};
  for (int64_t i = 0; i < count; i += LANES) {
    Vec left[4];
    for (int a = 0; a < 4; ++a) left[a] = to_double(p + a * apart + i);
    for (int b = 0; b < 4; ++b) {
      const Vec right = to_double(q + b * apart + i);
      for (int a = 0; a < 4; ++a) totals[a][b] += left[a] * right;
    }
  }
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) sums[a * pitch + b] += by * sum(totals[a][b]);
  }
}

// Products.

// A tile of a product, of which `rows` x `columns` entries are wanted. The left side is a panel as the right side is, or
// rows `pitch` entries apart of which as many as a tile has can be read.
template <bool PANEL, class T>
__attribute__((noinline)) void product_tile(bool add, const T* left, int64_t pitch, const T* right, int64_t depth,
                                            T* out, int64_t out_pitch, int64_t rows, int64_t columns) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  const int64_t left_row = PANEL ? 1 : pitch, left_step = PANEL ? WIDE : 1;
  if (rows >= TILE_ROWS && columns >= WIDE) {
    if (add) {
      tile<true>(left, left_row, left_step, right, depth, out, out_pitch);
    } else {
      tile<false>(left, left_row, left_step, right, depth, out, out_pitch);
    }
    return;
  }
  T edge[TILE_ROWS * WIDE];
  tile<false>(left, left_row, left_step, right, depth, edge, WIDE);
  for (int64_t r = 0; r < least(TILE_ROWS, rows); ++r) {
    for (int64_t c = 0; c < least(WIDE, columns); ++c) {
      T& target = out[r * out_pitch + c];
      target = add ? target + edge[r * WIDE + c] : edge[r * WIDE + c];
    }
  }
}

#ifndef PRE_
#define PRE_ 2
#endif
static inline void soon(const void* p, int64_t bytes) {
#if PRE_ > 0
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, PRE_);
#else
  (void)p; (void)bytes;
#endif
}

// out (+)= left times right: rows times panels, `right_pitch` entries from panel to panel.
template <class T>
void multiply(bool add, const T* left, int64_t pitch, const T* right, int64_t right_pitch, int64_t depth, T* out,
              int64_t out_pitch, int64_t rows, int64_t columns) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  for (int64_t start = 0; start < depth; start += DEPTH) {
    for (int64_t c = 0; c < columns; c += WIDE) {
      const T* next = right + (c / WIDE + 1) * right_pitch + start * WIDE;
      const int64_t share = up(up(least(DEPTH, depth - start) * WIDE * (int64_t)sizeof(T), 64) / (up(rows, TILE_ROWS) / TILE_ROWS), 64);
      for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        if (c + WIDE < columns) soon((const char*)next + r / TILE_ROWS * share, share);
        product_tile<false>(add || start > 0, left + r * pitch + start, pitch,
                            right + c / WIDE * right_pitch + start * WIDE, least(DEPTH, depth - start),
                            out + r * out_pitch + c, out_pitch, rows - r, columns - c);
      }
    }
  }
}

// Rows as panels: out[panel][k * WIDE + r] = rows[(panel * WIDE + r) * width + k], 0 where there is no such row.
template <class T>
void pack_rows(T* out, const T* rows, int64_t count, int64_t width) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>, STRIP = 16;
  for (int64_t first = 0; first < count; first += WIDE) {
    for (int64_t k = 0; k < width; k += STRIP) {
      const int64_t size = least(STRIP, width - k);
      T strip[WIDE][STRIP];
      for (int64_t r = 0; r < WIDE; ++r) {
        for (int64_t i = 0; i < size; ++i) strip[r][i] = first + r < count ? rows[(first + r) * width + k + i] : 0;
      }
      for (int64_t i = 0; i < size; ++i) {
        for (int64_t r = 0; r < WIDE; ++r) out[(k + i) * WIDE + r] = strip[r][i];
      }
    }
    out += width * WIDE;
  }
}

// Representations, as they enter the products: scaled and centered.

template <class T>
struct Matrix {
  Representation z;
  int64_t rows;
  const T *high, *low;  // the center as a sum of two

  const T* block(int64_t start, int64_t count, T* buffer) const {  // followed by what a tile may read
    const int64_t width = z.width;
    if (holds<T>(z.array) && z.scale == 1 && !z.center && start + up(count, TILE_ROWS) <= rows) {
      return (const T*)z.array.data + z.start + start * width;
    }
    widen(buffer, z.array, z.start + start * width, count * width);
    if (z.scale != 1) {
      for (int64_t i = 0; i < count * width; ++i) buffer[i] = (T)((double)buffer[i] * z.scale);
    }
    if (z.center) {
      for (int64_t r = 0; r < count; ++r) {
        T* const row = buffer + r * width;
        for (int64_t c = 0; c < width; ++c) row[c] = row[c] - high[c] - low[c];
      }
    }
    for (int64_t i = count * width; i < up(count, TILE_ROWS) * width; ++i) buffer[i] = 0;
    return buffer;
  }
};

template <class T>
int64_t buffer_size(int64_t rows, int64_t width) {
  return up(up(rows, TILE_ROWS) * width, 16);
}

template <class T>
void split_center(const Representation& z, T* high, T* low) {
  for (int64_t c = 0; c < z.width; ++c) {
    high[c] = (T)z.center[c];
    low[c] = (T)(z.center[c] - (double)high[c]);
  }
}

// One whole matrix as the right side of a product over its rows.
template <class T>
int64_t packed_size(int64_t rows, int64_t width) {
  return rows * up(width, TILE_COLUMNS<T>);
}

template <class T>
void pack(T* out, const Matrix<T>& matrix, const Threads& threads, T* buffers) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  const int64_t rows = matrix.rows, width = matrix.z.width;
  for_each(threads, up(rows, ROWS) / ROWS, [&](int64_t index, int64_t worker) {
    const int64_t start = index * ROWS, count = least(ROWS, rows - start);
    const T* block = matrix.block(start, count, buffers + worker * buffer_size<T>(ROWS, width));
    pack_columns<WIDE>(out + start * WIDE, rows * WIDE, block, count, width);
  });
}

// The representations of a problem.
template <class T>
struct Inputs {
  static constexpr int64_t PART = 512;  // rows whose sums are joined

  const CKAProducts& problem;
  int64_t widest = 0;
  Matrix<T>* matrices;
  T *high, *low, *buffers;
  double *first, *sums;

  Inputs(const CKAProducts& problem, int64_t workers, Memory& memory) : problem(problem) {
    const int64_t parts = up(problem.rows, PART) / PART;
    int64_t widths = 0;
    for (int64_t i = 0; i < problem.count; ++i) {
      const int64_t width = problem.matrices[i].width;
      widths += width;
      widest = width > widest ? width : widest;
    }
    const bool centered = problem.matrices[0].center;
    matrices = memory.take<Matrix<T>>(problem.count);
    high = memory.take<T>(centered ? widths : 0);
    low = memory.take<T>(centered ? widths : 0);
    first = memory.take<double>(centered ? widest : 0);
    sums = memory.take<double>(centered ? parts * widest : 0);
    buffers = memory.take<T>(workers * buffer_size<T>(DEPTH, widest));
  }

  T* buffer(int64_t worker) const { return buffers + worker * buffer_size<T>(DEPTH, widest); }

  void prepare(const Threads& threads) const {
    int64_t at = 0;
    for (int64_t i = 0; i < problem.count; ++i) {
      Representation& z = problem.matrices[i];
      if (z.center) {
        find_center(z, threads);
        split_center(z, high + at, low + at);
      }
      matrices[i] = {z, problem.rows, high + at, low + at};
      at += z.width;
    }
  }

  void find_center(const Representation& z, const Threads& threads) const {
    const int64_t width = z.width, rows = problem.rows, parts = up(rows, PART) / PART;
    T* const row = buffer(0);
    widen(row, z.array, z.start, width);
    for (int64_t c = 0; c < width; ++c) first[c] = (double)row[c] * z.scale;
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
        for (int64_t c = 0; c < width; ++c) total[c] += (double)entries[c] * z.scale - first[c];
      }
    });
    for (int64_t c = 0; c < width; ++c) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) total += sums[part * width + c];
      z.center[c] = first[c] + total / (double)rows;
    }
  }

  // Scales those whose products are out of range. -> Is there one?
  bool rescale() const {
    bool changed = false;
    for (int64_t i = 0; i < problem.count; ++i) {
      Representation& z = problem.matrices[i];
      if (ordinary<T>(problem.norms[i])) continue;
      z.scale = scale_of(largest_of<T>(z.array, z.start, problem.rows * z.width));
      changed |= z.scale != 1;
    }
    return changed;
  }

  // Where the inner product of i and j goes, i <= j.
  void set(int64_t i, int64_t j, double value) const {
    const int64_t first = problem.first, count = problem.count;
    if (i == j) problem.norms[i] = value;
    if (!problem.cross || !meet(i, j)) return;
    if (first == count) {
      problem.cross[i * count + j] = problem.cross[j * count + i] = value;
    } else if (i != j) {
      problem.cross[i * (count - first) + j - first] = value;
    }
  }

  // Is the product of i <= j wanted?
  bool meet(int64_t i, int64_t j) const {
    return i == j || problem.first == problem.count || (i < problem.first && j >= problem.first);
  }
};

// Feature space: the products are summed over groups of rows.
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

  const Inputs<T>& inputs;
  const CKAProducts& problem;
  int64_t panels = 0, products = 0, pieces = 0, group;  // group: rows in one
  int64_t* first_panel;
  Product* product;
  Piece* piece;
  double* squares;  // of each piece
  T* packed;        // [group / DEPTH][panels][DEPTH][WIDE]

  int64_t width(int64_t i) const { return problem.matrices[i].width; }
  int64_t panels_of(int64_t i) const { return up(width(i), WIDE) / WIDE; }

  FeatureSpace(const Inputs<T>& inputs, Memory& memory) : inputs(inputs), problem(inputs.problem) {
    const int64_t count = problem.count;
    first_panel = memory.take<int64_t>(count);
    for (int64_t i = 0; i < count; ++i) {
      if (memory.base) first_panel[i] = panels;
      panels += panels_of(i);
    }
    list([&](int64_t i, int64_t j) {
      ++products;
      for (int64_t p = 0; p < panels_of(i); ++p) pieces += up(i == j ? p + 1 : panels_of(j), CHUNK) / CHUNK;
    });
    product = memory.take<Product>(products);
    piece = memory.take<Piece>(pieces);
    squares = memory.take<double>(pieces);
    int64_t next = 0, next_piece = 0;
    list([&](int64_t i, int64_t j) {
      void* kept = i == j ? (problem.kept_norms ? problem.kept_norms[i] : nullptr) : problem.kept_cross;
      T* const out = kept ? (T*)kept : memory.take<T>(width(i) * width(j));
      if (!memory.base) return;
      product[next] = {i, j, out};
      for (int64_t p = 0; p < panels_of(i); ++p) {
        const int64_t end = i == j ? p + 1 : panels_of(j);
        for (int64_t q = 0; q < end; q += CHUNK) piece[next_piece++] = {next, p, q, least(end, q + CHUNK)};
      }
      ++next;
    });
    const int64_t most = (1 << GROUP_) / (int64_t)sizeof(T) / (panels * PANEL);  // blocks in 4 MiB
    group = DEPTH * (most < 1 ? 1 : least(most, up(problem.rows, DEPTH) / DEPTH));
    packed = memory.take<T>(group / DEPTH * panels * PANEL + TILE_ROWS);
  }

  template <class Body>
  void list(const Body& body) const {
    for (int64_t i = 0; i < problem.count; ++i) {
      for (int64_t j = i; j < problem.count; ++j) {
        if (inputs.meet(i, j)) body(i, j);
      }
    }
  }

  void run(const Threads& threads) const {
    for (int64_t first = 0; first < problem.rows; first += group) {
      const int64_t size = least(group, problem.rows - first), blocks = up(size, DEPTH) / DEPTH;
      for_each(threads, blocks * problem.count, [&](int64_t index, int64_t worker) {
        const int64_t block = index / problem.count, i = index % problem.count, start = block * DEPTH;
        const int64_t count = least(DEPTH, size - start);
        const T* rows = inputs.matrices[i].block(first + start, count, inputs.buffer(worker));
        pack_columns<WIDE>(packed + (block * panels + first_panel[i]) * PANEL, PANEL, rows, count, width(i));
      });
      for_each(threads, pieces, [&](int64_t index, int64_t) {
        multiply_piece(piece[index], first, size);
        if (first + size == problem.rows) squares[index] = finish(piece[index]);
      });
    }
    int64_t next = 0;
    for (int64_t index = 0; index < products; ++index) {
      double total = 0;
      for (; next < pieces && piece[next].product == index; ++next) total += squares[next];
      inputs.set(product[index].i, product[index].j, total);
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
          if (q + 1 < at.end) soon(left + PANEL + r * (PANEL / WIDE), PANEL / WIDE * TILE_ROWS * sizeof(T));
          product_tile<true>(first > 0 || block > 0, left + r, 0, right, depth,
                             of.out + (q * WIDE + r) * across + at.right * WIDE, across, rows - r,
                             across - at.right * WIDE);
        }
      }
    }
  }

  // The sum of squares; below the diagonal of a symmetric product what is above.
  double finish(const Piece& at) const {
    const Product& of = product[at.product];
    const int64_t across = width(of.i), columns = least(WIDE, across - at.right * WIDE);
    double total = 0;
    for (int64_t q = at.begin; q < at.end; ++q) {
      const int64_t rows = least(WIDE, width(of.j) - q * WIDE);
      const bool twice = of.i == of.j && q < at.right;
      T* const block = of.out + q * WIDE * across + at.right * WIDE;
      T* const mirrored = of.out + at.right * WIDE * across + q * WIDE;
      double sum = 0;
      for (int64_t r = 0; r < rows; ++r) sum += inner(block + r * across, block + r * across, columns);
      total += twice ? 2 * sum : sum;
      if (!twice || !problem.kept_norms) continue;
      for (int64_t c = 0; c < columns; ++c) {
        for (int64_t r = 0; r < rows; ++r) mirrored[c * across + r] = block[r * across + c];
      }
    }
    return total;
  }
};

// Sample space: blocks of the Gram matrices of all representations meet while they are in the cache.
template <class T>
struct SampleSpace {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>, SLICE = 2048;

  const Inputs<T>& inputs;
  const CKAProducts& problem;
  int64_t size, blocks, widths = 0;  // size: rows and columns of a block
  T *packed, *grams;                 // of the workers, one behind another
  double* sums;                      // [blocks][count][count]

  SampleSpace(const Inputs<T>& inputs, int64_t workers, Memory& memory) : inputs(inputs), problem(inputs.problem) {
    size = least(up(problem.rows / 8, WIDE), 128);
    if (size < WIDE) size = WIDE;
    blocks = up(problem.rows, size) / size;
    for (int64_t i = 0; i < problem.count; ++i) widths += problem.matrices[i].width;
    packed = memory.take<T>(workers * packed_room());
    grams = memory.take<T>(workers * problem.count * gram_room());
    sums = memory.take<double>(blocks * problem.count * problem.count);
  }

  int64_t packed_room() const { return size * widths; }
  int64_t gram_room() const { return up(size, TILE_ROWS) * size; }
  int64_t rows_of(int64_t block) const { return least(size, problem.rows - block * size); }

  // also(i, j, gram, pitch, worker): what else is done with the block of the first Gram matrix.
  template <class Also>
  void run(const Threads& threads, const Also& also) const {
    const int64_t count = problem.count;
    for_each(threads, blocks, [&](int64_t index, int64_t worker) {
      const int64_t j = blocks - 1 - index;  // those with the most work first
      column(j, worker, sums + j * count * count, also);
    });
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t q = p; q < count; ++q) {
        double total = 0;
        for (int64_t j = 0; j < blocks; ++j) total += sums[(j * count + p) * count + q];
        inputs.set(p, q, total);
      }
    }
  }

  template <class Also>
  void column(int64_t j, int64_t worker, double* totals, const Also& also) const {
    const int64_t count = problem.count, columns = rows_of(j), pitch = up(columns, WIDE);
    T* const own = packed + worker * packed_room();
    T* const gram = grams + worker * count * gram_room();
    for (int64_t p = 0, at = 0; p < count; at += inputs.matrices[p++].z.width * pitch) {
      const T* rows = inputs.matrices[p].block(j * size, columns, inputs.buffer(worker));
      pack_rows(own + at, rows, columns, inputs.matrices[p].z.width);
    }
    for (int64_t p = 0; p < count * count; ++p) totals[p] = 0;
    for (int64_t i = 0; i <= j; ++i) {
      const int64_t rows = rows_of(i);
      for (int64_t p = 0, at = 0; p < count; at += inputs.matrices[p++].z.width * pitch) {
        const int64_t width = inputs.matrices[p].z.width;
        const T* left = inputs.matrices[p].block(i * size, rows, inputs.buffer(worker));
        multiply(false, left, width, own + at, width * WIDE, width, gram + p * gram_room(), pitch,
                 up(rows, TILE_ROWS), pitch);
        if (problem.kept_norms) keep((T*)problem.kept_norms[p], i, j, gram + p * gram_room(), pitch);
      }
      join(gram, rows * pitch, i < j ? 2 : 1, totals);
      also(i, j, gram, pitch, worker);
    }
  }

  void keep(T* whole, int64_t i, int64_t j, const T* gram, int64_t pitch) const {
    const int64_t rows = problem.rows;
    for (int64_t r = 0; r < rows_of(i); ++r) {
      T* const row = whole + (i * size + r) * rows + j * size;
      for (int64_t c = 0; c < rows_of(j); ++c) row[c] = gram[r * pitch + c];
    }
    if (i == j) return;
    for (int64_t c = 0; c < rows_of(j); ++c) {
      T* const row = whole + (j * size + c) * rows + i * size;
      for (int64_t r = 0; r < rows_of(i); ++r) row[r] = gram[r * pitch + c];
    }
  }

  // totals[p * count + q] += by <gram_p, gram_q>
  void join(const T* gram, int64_t entries, double by, double* totals) const {
    const int64_t count = problem.count, first = problem.first, room = gram_room();
    const int64_t others = first == count ? 0 : first;
    for (int64_t start = 0; start < entries; start += SLICE) {
      const int64_t length = least(SLICE, entries - start);
      const T* const at = gram + start;
      const auto one = [&](int64_t p, int64_t q) {
        totals[p * count + q] += by * inner(at + p * room, at + q * room, length);
      };
      for (int64_t p = 0; p < count; ++p) {
        if (others || p >= first / 4 * 4) one(p, p);
      }
      for (int64_t p = 0; p < first; p += 4) {
        for (int64_t q = others ? others : p; q < count; q += 4) {
          if (p + 4 <= first && q + 4 <= count) {
            inner_of_fours(at + p * room, at + q * room, room, length, by, totals + p * count + q, count);
            continue;
          }
          for (int64_t a = p; a < least(p + 4, first); ++a) {
            for (int64_t b = others ? q : q > a ? q : a + 1; b < least(q + 4, count); ++b) one(a, b);
          }
        }
      }
    }
  }
};

template <class T>
int64_t find_products(const CKAProducts& problem, const Threads& threads, char* at) {
  Memory memory{at};
  const Inputs<T> inputs(problem, threads.workers, memory);
  const auto solve = [&](const auto& run) {
    for (int64_t i = 0; i < problem.count; ++i) problem.matrices[i].scale = 1;
    inputs.prepare(threads);
    run();
    if (!inputs.rescale()) return;
    inputs.prepare(threads);
    run();
  };
  if (problem.sample_space) {
    const SampleSpace<T> space(inputs, threads.workers, memory);
    if (at) solve([&] { space.run(threads, [](int64_t, int64_t, const T*, int64_t, int64_t) {}); });
  } else {
    const FeatureSpace<T> space(inputs, memory);
    if (at) solve([&] { space.run(threads); });
  }
  return memory.used;
}

// The gradients: products of [rows, rows] or of the representations with what was kept.

// target = scale * target, for the gradient in what was not scaled.
template <class T>
void rescale_rows(T* target, int64_t count, double scale) {
  if (scale == 1) return;
  for (int64_t i = 0; i < count; ++i) target[i] = (T)((double)target[i] * scale);
}

// gradient = M z for a symmetric [rows, rows] matrix, whose rows are formed by fill(first, count, into, worker).
template <class T, class Fill>
void sample_gradient(const Matrix<T>& matrix, T* gradient, const Threads& threads, T* packed, T* buffers, T* left,
                     const Fill& fill) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  const int64_t rows = matrix.rows, width = matrix.z.width;
  pack(packed, matrix, threads, buffers);
  for_each(threads, up(rows, ROWS) / ROWS, [&](int64_t index, int64_t worker) {
    const int64_t first = index * ROWS, count = least(ROWS, rows - first);
    T* const own = left + worker * buffer_size<T>(ROWS, rows);
    fill(first, count, own, worker);
    T* const target = gradient + first * width;
    multiply(false, own, rows, packed, rows * WIDE, rows, target, width, count, width);
    rescale_rows(target, count * width, matrix.z.scale);
  });
}

template <class T>
Matrix<T> matrix_of(const Representation& z, int64_t rows, Memory& memory) {
  T* const high = memory.take<T>(z.center ? z.width : 0);
  T* const low = memory.take<T>(z.center ? z.width : 0);
  if (memory.base && z.center) split_center(z, high, low);
  return {z, rows, high, low};
}

template <class T>
struct Gradients {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>;

  const CKAGradients& problem;
  int64_t rows, x_width, y_width, used;
  Matrix<T> x, y;
  T *x_buffers, *y_buffers;
  T *x_right, *y_right;  // feature space: what [y x] and [x y] are multiplied with
  T *packed, *left;      // sample space

  Gradients(const CKAGradients& problem, int64_t workers, char* at) : problem(problem), rows(problem.rows) {
    Memory memory{at};
    x_width = problem.x.width;
    y_width = problem.y.width;
    x = matrix_of<T>(problem.x, rows, memory);
    y = matrix_of<T>(problem.y, rows, memory);
    x_buffers = memory.take<T>(workers * buffer_size<T>(ROWS, x_width));
    y_buffers = memory.take<T>(workers * buffer_size<T>(ROWS, y_width));
    if (problem.sample_space) {
      packed = memory.take<T>(packed_size<T>(rows, x_width > y_width ? x_width : y_width));
      left = memory.take<T>(workers * buffer_size<T>(ROWS, rows));
    } else {
      const int64_t together = x_width + y_width;
      x_right = memory.take<T>(problem.x_gradient ? together * up(x_width, WIDE) : 0);
      y_right = memory.take<T>(problem.y_gradient ? together * up(y_width, WIDE) : 0);
    }
    used = memory.used;
  }

  void in_sample_space(const Threads& threads) const {
    const T *xx = (const T*)problem.xx, *yy = (const T*)problem.yy;
    const auto gradient_in = [&](const Matrix<T>& matrix, T* buffers, void* gradient, const T* own, double by_own,
                                 const T* other) {
      if (!gradient) return;
      sample_gradient(matrix, (T*)gradient, threads, packed, buffers, left,
                      [&](int64_t first, int64_t count, T* into, int64_t) {
                        for (int64_t i = 0; i < count * rows; ++i) {
                          const double of_other = (double)other[first * rows + i] * problem.of_cross;
                          into[i] = (T)(of_other + (double)own[first * rows + i] * by_own);
                        }
                      });
    };
    gradient_in(x, x_buffers, problem.x_gradient, xx, problem.of_xx, yy);
    gradient_in(y, y_buffers, problem.y_gradient, yy, problem.of_yy, xx);
  }

  // Panels of columns of a kept product, or of its transpose, times a factor.
  static void weigh(T* out, const T* product, int64_t height, int64_t width, int64_t panel, double by, bool transposed) {
    const int64_t first = panel * WIDE, columns = least(WIDE, width - first);
    for (int64_t k = 0; k < height; ++k) {
      for (int64_t c = 0; c < WIDE; ++c) {
        const int64_t at = transposed ? (first + c) * height + k : k * width + first + c;
        out[k * WIDE + c] = c < columns ? (T)((double)product[at] * by) : 0;
      }
    }
  }

  void in_feature_space(const Threads& threads) const {
    const T *cross = (const T*)problem.cross, *xx = (const T*)problem.xx, *yy = (const T*)problem.yy;
    const int64_t together = (x_width + y_width) * WIDE;  // from panel to panel
    const int64_t x_panels = problem.x_gradient ? up(x_width, WIDE) / WIDE : 0;
    const int64_t y_panels = problem.y_gradient ? up(y_width, WIDE) / WIDE : 0;
    for_each(threads, x_panels + y_panels, [&](int64_t index, int64_t) {
      if (index < x_panels) {
        T* const out = x_right + index * together;
        weigh(out, cross, y_width, x_width, index, problem.of_cross, false);
        weigh(out + y_width * WIDE, xx, x_width, x_width, index, problem.of_xx, false);
      } else {
        T* const out = y_right + (index - x_panels) * together;
        weigh(out, cross, x_width, y_width, index - x_panels, problem.of_cross, true);
        weigh(out + x_width * WIDE, yy, y_width, y_width, index - x_panels, problem.of_yy, false);
      }
    });
    for_each(threads, up(rows, ROWS) / ROWS, [&](int64_t index, int64_t worker) {
      const int64_t first = index * ROWS, count = least(ROWS, rows - first);
      const T* of_x = x.block(first, count, x_buffers + worker * buffer_size<T>(ROWS, x_width));
      const T* of_y = y.block(first, count, y_buffers + worker * buffer_size<T>(ROWS, y_width));
      const auto gradient_in = [&](const Matrix<T>& own, const T* of_own, const Matrix<T>& other, const T* of_other,
                                   const T* right, void* gradient) {
        if (!gradient) return;
        const int64_t width = own.z.width, before = other.z.width;
        T* const target = (T*)gradient + first * width;
        multiply(false, of_other, before, right, together, before, target, width, count, width);
        multiply(true, of_own, width, right + before * WIDE, together, width, target, width, count, width);
        rescale_rows(target, count * width, own.z.scale);
      };
      gradient_in(x, of_x, y, of_y, x_right, problem.x_gradient);
      gradient_in(y, of_y, x, of_x, y_right, problem.y_gradient);
    });
  }

  void run(const Threads& threads) const {
    if (problem.sample_space) {
      in_sample_space(threads);
    } else {
      in_feature_space(threads);
    }
  }
};

// A given kernel.

template <class T>
struct Kernel {
  const KernelProducts& problem;

  // `count` entries of row i from column j on.
  void read(T* out, int64_t i, int64_t j, int64_t count) const {
    widen(out, problem.kernel, problem.kernel_start + i * problem.rows + j, count);
    if (problem.row_center) {
      const double own = problem.row_center[i], *const of_columns = problem.column_center + j, by = problem.kernel_scale;
      for (int64_t c = 0; c < count; ++c) out[c] = (T)((double)out[c] * by - own - of_columns[c]);
    } else if (problem.kernel_scale != 1) {
      for (int64_t c = 0; c < count; ++c) out[c] = (T)((double)out[c] * problem.kernel_scale);
    }
  }
};

template <class T>
struct KernelSums {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>;

  KernelProducts& problem;
  int64_t rows, width, blocks, workers;
  double *sums;               // [blocks][2]: trace and norm
  double *row_sums, *column_sums, *first_row;  // of the kernel, [rows], [blocks][rows] and [rows]
  T *packed, *left, *buffers, *row;

  KernelSums(KernelProducts& problem, int64_t workers, Memory& memory) : problem(problem), workers(workers) {
    rows = problem.rows;
    width = problem.x.width;
    blocks = up(rows, ROWS) / ROWS;
    sums = memory.take<double>(blocks * 2);
    row_sums = memory.take<double>(problem.row_center ? rows : 0);
    column_sums = memory.take<double>(problem.row_center ? blocks * rows : 0);
    first_row = memory.take<double>(problem.row_center ? rows : 0);
    row = memory.take<T>(problem.row_center ? workers * up(rows, 16) : 0);
    if (problem.sample_space) return;
    packed = memory.take<T>(packed_size<T>(rows, width));
    left = memory.take<T>(workers * ROWS * DEPTH);
    buffers = memory.take<T>(workers * buffer_size<T>(ROWS, width));
  }

  // (H K H)_ij = K_ij - row_center_i - column_center_j. The sums are of K_ij - K_0j - K_i0 + K_00, in which a constant
  // kernel is 0 to the last bit.
  void find_centers(const Threads& threads) const {
    const Array& kernel = problem.kernel;
    const int64_t start = problem.kernel_start;
    const double scale = problem.kernel_scale;
    widen(row, kernel, start, rows);
    for (int64_t j = 0; j < rows; ++j) first_row[j] = (double)row[j] * scale;
    for_each(threads, blocks, [&](int64_t block, int64_t worker) {
      double* const totals = column_sums + block * rows;
      for (int64_t j = 0; j < rows; ++j) totals[j] = 0;
      for (int64_t i = block * ROWS; i < least(rows, (block + 1) * ROWS); ++i) {
        const T* entries = (const T*)kernel.data + start + i * rows;
        if (!holds<T>(kernel)) {
          widen(row + worker * up(rows, 16), kernel, start + i * rows, rows);
          entries = row + worker * up(rows, 16);
        }
        problem.row_center[i] = (double)entries[0] * scale - first_row[0];
        row_sums[i] = center_row(entries, scale, problem.row_center[i], totals);
      }
    });
    double total = 0;
    for (int64_t i = 0; i < rows; ++i) total += row_sums[i];
    const double mean = total / (double)rows / (double)rows;
    for (int64_t i = 0; i < rows; ++i) problem.row_center[i] += row_sums[i] / (double)rows - mean;
    for (int64_t j = 0; j < rows; ++j) {
      double sum = 0;
      for (int64_t block = 0; block < blocks; ++block) sum += column_sums[block * rows + j];
      problem.column_center[j] = first_row[j] + sum / (double)rows;
    }
  }

  double center_row(const T* entries, double scale, double own, double* totals) const {
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

  // Kx, of blocks of rows.
  void multiply_kernel(const Matrix<T>& x, const Threads& threads) const {
    const Kernel<T> kernel{problem};
    T* const product = (T*)problem.product;
    pack(packed, x, threads, buffers);
    for_each(threads, blocks, [&](int64_t block, int64_t worker) {
      const int64_t first = block * ROWS, count = least(ROWS, rows - first);
      T* const own = left + worker * ROWS * DEPTH;
      T* const target = product + first * width;
      double norm = 0;
      for (int64_t start = 0; start < rows; start += DEPTH) {
        const int64_t depth = least(DEPTH, rows - start);
        for (int64_t r = 0; r < count; ++r) {
          kernel.read(own + r * DEPTH, first + r, start, depth);
          norm += inner(own + r * DEPTH, own + r * DEPTH, depth);
        }
        multiply(start > 0, own, DEPTH, packed + start * WIDE, rows * WIDE, depth, target, width, count, width);
      }
      const T* of_x = x.block(first, count, buffers + worker * buffer_size<T>(ROWS, width));
      sums[2 * block] = inner(of_x, target, count * width);
      sums[2 * block + 1] = norm;
    });
    join(blocks);
  }

  void join(int64_t count) const {
    problem.trace = problem.kernel_norm = 0;
    for (int64_t i = 0; i < count; ++i) {
      problem.trace += sums[2 * i];
      problem.kernel_norm += sums[2 * i + 1];
    }
  }

  bool rescale() const {
    if (ordinary<T>(problem.kernel_norm)) return false;
    problem.kernel_scale = scale_of(largest_of<T>(problem.kernel, problem.kernel_start, rows * rows));
    return problem.kernel_scale != 1;
  }
};

template <class T>
int64_t find_kernel_products(KernelProducts& problem, const Threads& threads, char* at) {
  Memory memory{at};
  const CKAProducts of_x{&problem.x,      1, 1, problem.rows, problem.wide, problem.sample_space,
                         &problem.x_norm, nullptr, nullptr, problem.xx ? &problem.xx : nullptr};
  const Inputs<T> inputs(of_x, threads.workers, memory);
  const KernelSums<T> kernel(problem, threads.workers, memory);
  const auto solve = [&](const auto& run) {
    problem.x.scale = problem.kernel_scale = 1;
    for (bool again = true, last = false; again; last = true) {
      inputs.prepare(threads);
      if (problem.row_center) kernel.find_centers(threads);
      run();
      again = !last && (inputs.rescale() | kernel.rescale());
    }
  };
  if (!problem.sample_space) {
    const FeatureSpace<T> space(inputs, memory);
    if (!at) return memory.used;
    solve([&] {
      space.run(threads);
      kernel.multiply_kernel(inputs.matrices[0], threads);
    });
    return memory.used;
  }
  const SampleSpace<T> space(inputs, threads.workers, memory);
  const int64_t size = space.size;
  double* const sums = memory.take<double>(2 * space.blocks);
  T* const blocks = memory.take<T>(threads.workers * 2 * size * size);
  if (!at) return memory.used;
  const Kernel<T> entries{problem};
  solve([&] {
    for (int64_t i = 0; i < 2 * space.blocks; ++i) sums[i] = 0;
    space.run(threads, [&](int64_t i, int64_t j, const T* gram, int64_t pitch, int64_t worker) {
      T *const block = blocks + worker * 2 * size * size, *const other = block + size * size;
      const int64_t rows = space.rows_of(i), columns = space.rows_of(j);
      double norm = 0;
      for (int64_t r = 0; r < rows; ++r) {
        T* const row = block + r * pitch;
        entries.read(row, i * size + r, j * size, columns);
        norm += inner(row, row, columns);
        for (int64_t c = columns; c < pitch; ++c) row[c] = 0;
      }
      if (i < j) {  // what lies below the diagonal, and may be no mirror image
        for (int64_t c = 0; c < columns; ++c) {
          entries.read(other + c * size, j * size + c, i * size, rows);
          norm += inner(other + c * size, other + c * size, rows);
        }
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; ++c) block[r * pitch + c] += other[c * size + r];
        }
      }
      sums[2 * j] += inner(gram, block, rows * pitch);
      sums[2 * j + 1] += norm;
    });
    problem.trace = problem.kernel_norm = 0;
    for (int64_t j = 0; j < space.blocks; ++j) {
      problem.trace += sums[2 * j];
      problem.kernel_norm += sums[2 * j + 1];
    }
  });
  return memory.used;
}

template <class T>
int64_t find_kernel_gradient(const KernelGradient& problem, const Threads& threads, char* at) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  Memory memory{at};
  const KernelProducts& products = problem.products;
  const int64_t rows = products.rows, width = products.x.width;
  const Matrix<T> x = matrix_of<T>(products.x, rows, memory);
  const T* const xx = (const T*)products.xx;
  T* const gradient = (T*)problem.gradient;
  T* const buffers = memory.take<T>(threads.workers * buffer_size<T>(ROWS, width));
  if (products.sample_space) {
    T* const packed = memory.take<T>(packed_size<T>(rows, width));
    T* const left = memory.take<T>(threads.workers * buffer_size<T>(ROWS, rows));
    if (!at) return memory.used;
    const Kernel<T> kernel{products};
    sample_gradient(x, gradient, threads, packed, buffers, left, [&](int64_t first, int64_t count, T* into, int64_t) {
      for (int64_t r = 0; r < count; ++r) {
        T* const row = into + r * rows;
        const T* const own = xx + (first + r) * rows;
        kernel.read(row, first + r, 0, rows);
        for (int64_t j = 0; j < rows; ++j) {
          row[j] = (T)((double)row[j] * problem.of_kernel + (double)own[j] * problem.of_xx);
        }
      }
    });
    return memory.used;
  }
  T* const right = memory.take<T>(width * up(width, WIDE));
  if (!at) return memory.used;
  for_each(threads, up(width, WIDE) / WIDE, [&](int64_t panel, int64_t) {
    Gradients<T>::weigh(right + panel * width * WIDE, xx, width, width, panel, problem.of_xx, false);
  });
  const T* const product = (const T*)products.product;
  for_each(threads, up(rows, ROWS) / ROWS, [&](int64_t index, int64_t worker) {
    const int64_t first = index * ROWS, count = least(ROWS, rows - first);
    T* const target = gradient + first * width;
    const T* const of_x = x.block(first, count, buffers + worker * buffer_size<T>(ROWS, width));
    for (int64_t i = 0; i < count * width; ++i) target[i] = (T)((double)product[first * width + i] * problem.of_kernel);
    multiply(true, of_x, width, right, width * WIDE, width, target, width, count, width);
    rescale_rows(target, count * width, products.x.scale);
  });
  return memory.used;
}

template <class T>
int64_t find_gradients(const CKAGradients& problem, const Threads& threads, char* at) {
  const Gradients<T> gradients(problem, threads.workers, at);
  if (at) gradients.run(threads);
  return gradients.used;
}

}  // namespace

int64_t cka_products(const CKAProducts& problem, const Threads& threads, void* memory) {
  return problem.wide ? find_products<double>(problem, threads, (char*)memory)
                      : find_products<float>(problem, threads, (char*)memory);
}

int64_t cka_gradients(const CKAGradients& problem, const Threads& threads, void* memory) {
  return problem.wide ? find_gradients<double>(problem, threads, (char*)memory)
                      : find_gradients<float>(problem, threads, (char*)memory);
}

int64_t kernel_products(KernelProducts& problem, const Threads& threads, void* memory) {
  return problem.wide ? find_kernel_products<double>(problem, threads, (char*)memory)
                      : find_kernel_products<float>(problem, threads, (char*)memory);
}

int64_t kernel_gradient(const KernelGradient& problem, const Threads& threads, void* memory) {
  return problem.products.wide ? find_kernel_gradient<double>(problem, threads, (char*)memory)
                               : find_kernel_gradient<float>(problem, threads, (char*)memory);
}

}  // namespace fedkernels::FEDKERNELS_ISA
