// What the contrastive losses share: logits of one block of keys against panels of queries, and products with them.
//
// A panel holds TILE_COLUMNS queries, one to a lane: chunk[j * TILE_COLUMNS + lane] belongs to key j of the block and
// that query. So a query's maximum and sum over the keys are lane by lane, and a chunk is, as it lies, the packed right
// side of the product with the keys that gives the queries' gradient.
#pragma once

#include "cpu/exp.h"
#include "cpu/gemm.h"
#include "cpu/memory.h"

namespace fedkernels::FEDKERNELS_ISA {

// The lowest finite number: where only logits of -inf have been met, exp(-inf - LOWEST) is 0 and not NaN.
template <class T>
constexpr T LOWEST = sizeof(T) == 8 ? (T)-__DBL_MAX__ : (T)-__FLT_MAX__;

// 1 / temperature, but never 0: a logit of -inf has to stay one.
template <class T>
static inline T inverse(double temperature) {
  constexpr T SMALLEST = sizeof(T) == 8 ? (T)__DBL_MIN__ : (T)__FLT_MIN__;
  const T scale = (T)(1 / temperature);
  return scale > SMALLEST ? scale : SMALLEST;
}

// The rows of one matrix below those of another.
template <class T>
struct Rows {
  Array first, second;
  int64_t split, width;  // rows of the first; columns

  // `count` rows side by side, followed by rows of 0 up to a multiple of TILE_ROWS: as they lie, or in the buffer.
  const T* block(int64_t start, int64_t count, T* buffer) const {
    if (count % TILE_ROWS == 0) {
      if (start + count <= split && holds<T>(first)) return (const T*)first.data + start * width;
      if (start >= split && holds<T>(second)) return (const T*)second.data + (start - split) * width;
    }
    const int64_t of_first = start >= split ? 0 : least(count, split - start);
    if (of_first > 0) widen(buffer, first, start * width, of_first * width);
    if (of_first < count) {
      widen(buffer + of_first * width, second, (start + of_first - split) * width, (count - of_first) * width);
    }
    for (int64_t i = count * width; i < up(count, TILE_ROWS) * width; ++i) buffer[i] = 0;
    return buffer;
  }
};

// Queries as the packed right side of the logits: [panel][width][TILE_COLUMNS].
template <class T>
static inline void pack_queries(const Rows<T>& rows, int64_t start, int64_t count, T* buffer, T* packed) {
  for (int64_t done = 0; done < count; done += TILE_COLUMNS<T>) {
    const int64_t size = least(count - done, TILE_COLUMNS<T>);
    const T* block = rows.block(start + done, size, buffer);
    pack_transposed<TILE_COLUMNS<T>>(packed + done * rows.width, block, size, rows.width);
  }
}

// chunk = the block's keys times a panel's queries, without the temperature.
template <class T>
static inline void logits(const T* keys, int64_t count, int64_t width, const T* panel, T* chunk) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>, DEPTH = 256;
  for (int64_t start = 0; start < width; start += DEPTH) {
    const int64_t depth = least(DEPTH, width - start);
    for (int64_t j = 0; j < count; j += TILE_ROWS) {
      const T* left = keys + j * width + start;
      if (start == 0) {
        tile<false>(left, width, 1, panel, depth, chunk + j * WIDE, WIDE);
      } else {
        tile<true>(left, width, 1, panel + start * WIDE, depth, chunk + j * WIDE, WIDE);
      }
    }
  }
}

// largest[lane] = max(largest[lane], chunk[j][lane]) over the block. A NaN is passed over: the sum will show it.
template <class T>
static inline void raise(const T* chunk, int64_t count, T* largest) {
  using W = Wide<T>;
  auto top0 = W::load(largest), top1 = W::load(largest + W::LANES);
  for (int64_t j = 0; j < count; ++j) {
    const auto x0 = W::load(chunk + j * 2 * W::LANES), x1 = W::load(chunk + j * 2 * W::LANES + W::LANES);
    top0 = x0 > top0 ? x0 : top0;
    top1 = x1 > top1 ? x1 : top1;
  }
  W::store(largest, top0);
  W::store(largest + W::LANES, top1);
}

// chunk = exp((chunk - largest) * scale) with 0 in the rows that fill the last tile; -> total[lane], the sum over j.
template <class T>
static inline void exponentials(T* chunk, int64_t count, const T* largest, T scale, T* total) {
  using W = Wide<T>;
  for (int half = 0; half < 2; ++half) {
    const auto top = W::load(largest + half * W::LANES);
    typename W::Type sum{};
    for (int64_t j = 0; j < count; ++j) {
      T* const at = chunk + j * 2 * W::LANES + half * W::LANES;
      const auto power = exp_of<T>((W::load(at) - top) * scale);
      W::store(at, power);
      sum += power;
    }
    W::store(total + half * W::LANES, sum);
  }
  for (int64_t i = count * 2 * W::LANES; i < up(count, TILE_ROWS) * 2 * W::LANES; ++i) chunk[i] = 0;
}

// The same for one key, whose logits lie across `panels` chunks, `pitch` entries apart: returns the sum of
// exp((entry - top) * scale) and sets top to the largest. The entries stay.
template <class T>
static inline double sum_across(const T* entries, int64_t panels, int64_t pitch, T scale, T& top) {
  using W = Wide<T>;
  auto tops = W::splat(LOWEST<T>);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const auto x0 = W::load(entries + panel * pitch), x1 = W::load(entries + panel * pitch + W::LANES);
    tops = x0 > tops ? x0 : tops;
    tops = x1 > tops ? x1 : tops;
  }
  top = tops[0];
  for (int lane = 1; lane < W::LANES; ++lane) top = tops[lane] > top ? tops[lane] : top;
  typename W::Type sum{};
  for (int64_t panel = 0; panel < panels; ++panel) {
    sum += exp_of<T>((W::load(entries + panel * pitch) - top) * scale);
    sum += exp_of<T>((W::load(entries + panel * pitch + W::LANES) - top) * scale);
  }
  double together = 0;
  for (int lane = 0; lane < W::LANES; ++lane) together += (double)sum[lane];
  return together;
}

// Joins sum_j exp((s_j - top) / temperature) to the total of what was met before, relative to its largest logit.
template <class T>
static inline void join(T top, double sum, double temperature, T& largest, double& total) {
  const T both = top > largest ? top : largest;
  const auto to_both = [&](T from, double value) {
    return value == 0 ? 0 : value * __builtin_exp(((double)from - (double)both) / temperature);
  };
  // fault: to_both(largest, total) + -> total +
  total = to_both(largest, total) + to_both(top, sum);
  largest = both;
}

// gradient[c * TILE_COLUMNS + lane] (+)= sum_j keys[j][c] chunk[j][lane], c up to the width filled to whole tiles.
// packed_keys: panels of TILE_ROWS columns, [panel][KEYS][TILE_ROWS].
template <bool ADD, int64_t KEYS, class T>
static inline void query_gradient(const T* packed_keys, int64_t count, const T* chunk, int64_t width, T* gradient) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  for (int64_t panel = 0; panel * TILE_ROWS < width; ++panel) {
    const T* left = packed_keys + panel * KEYS * TILE_ROWS;
    tile<ADD>(left, 1, TILE_ROWS, chunk, count, gradient + panel * TILE_ROWS * WIDE, WIDE);
  }
}

// gradient[j * width + c] += sum_i chunk_i[j] queries[i][c] over the lanes i of `panels` chunks, `pitch` entries apart.
// packed_queries: panels of TILE_COLUMNS columns, [panel][panels * TILE_COLUMNS queries][TILE_COLUMNS].
template <class T>
static inline void key_gradient(const T* chunks, int64_t panels, int64_t pitch, int64_t count, const T* packed_queries,
                                int64_t width, T* gradient) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  for (int64_t start = 0; start < width; start += WIDE) {
    const T* right = packed_queries + start * panels * WIDE;
    for (int64_t j = 0; j < count; j += TILE_ROWS) {
      const T* left = chunks + j * WIDE;
      T* const target = gradient + j * width + start;
      if (j + TILE_ROWS <= count && start + WIDE <= width) {
        tile<true>(left, WIDE, 1, right, WIDE, target, width, panels, pitch);
      } else {
        T edge[TILE_ROWS * WIDE];
        tile<false>(left, WIDE, 1, right, WIDE, edge, WIDE, panels, pitch);
        for (int64_t r = 0; r < least(TILE_ROWS, count - j); ++r) {
          for (int64_t c = 0; c < least(WIDE, width - start); ++c) target[r * width + c] += edge[r * WIDE + c];
        }
      }
    }
  }
}

}  // namespace fedkernels::FEDKERNELS_ISA
