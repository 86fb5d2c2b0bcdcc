// The logits are symmetric: a group of rows meets the blocks of rows from its own on, and each block beyond the group
// counts for the rows of both. Two passes of this kind do: the first finds every row's sum, the second forms w_ij =
// (p_ij + p_ji) / t and with it the gradients of row i and of row j. That is half a product, half a product again and
// one product for the gradients, where a gradient from the plain formula takes one and two. The second pass goes by
// spans of blocks: a span's w_ij are kept until both their rows have had them.
#include "cpu/nt_xent.h"

#include "cpu/logits.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

// Keys in a block. With half as many a call takes about a tenth longer: kept weights are passed over once a block.
constexpr int64_t KEYS = 256 / TILE_ROWS * TILE_ROWS;

template <class T>
struct NTXent {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>, PANELS = 4, SPAN = 8;

  const NTXentProblem& problem;
  Rows<T> rows;
  int64_t batch, count, width, blocks, group, span;  // count: of rows; group: rows in one; span: blocks in one
  T scale;                                           // 1 / temperature
  T *losses, *gradient;

  // What all workers share.
  T *largest, *positive, *weight;  // of each row; weight: the loss's over temperature and total
  double* total;
  T *packed_queries, *plain_queries, *largest_of, *sums_of, *kept, *packed_keys, *own;
  T *buffers, *chunks;  // of the workers, one behind another
  int64_t used;

  NTXent(const NTXentProblem& problem, int64_t workers, char* at) : problem(problem) {
    batch = problem.batch;
    count = 2 * batch;
    width = problem.width;
    rows = {problem.view1, problem.view2, batch, width};
    blocks = up(count, KEYS) / KEYS;
    scale = inverse<T>(problem.temperature);
    losses = (T*)problem.losses;
    gradient = (T*)problem.gradient;
    group = least(2, blocks) * KEYS;
    span = least(blocks, SPAN > 2 * workers ? SPAN : 2 * workers);

    Memory memory{at};
    const int64_t lanes = up(group, WIDE);
    largest = memory.take<T>(count);
    positive = memory.take<T>(count);
    weight = memory.take<T>(count);
    total = memory.take<double>(count);
    packed_queries = memory.take<T>(lanes * width);
    largest_of = memory.take<T>(blocks * lanes);
    sums_of = memory.take<T>(blocks * lanes);
    buffers = memory.take<T>(workers * KEYS * width);
    // The first pass needs `chunks`, the second the rest: they share the room.
    const int64_t start = memory.used;
    chunks = memory.take<T>(workers * lanes * KEYS);
    const int64_t first_pass = memory.used;
    memory.share(start);
    plain_queries = memory.take<T>(gradient ? lanes * up(width, WIDE) : 0);
    kept = memory.take<T>(gradient ? lanes * kept_rows() : 0);
    packed_keys = memory.take<T>(gradient ? blocks * KEYS * up(width, TILE_ROWS) : 0);
    own = memory.take<T>(gradient ? lanes / WIDE * own_size() : 0);
    used = memory.used > first_pass ? memory.used : first_pass;
  }

  int64_t kept_rows() const { return up(least(count, span * KEYS), TILE_ROWS); }
  int64_t own_size() const { return up(width, TILE_ROWS) * WIDE; }  // of one panel
  int64_t keys_of(int64_t block) const { return least(KEYS, count - block * KEYS); }
  double given_weight(int64_t i) const { return problem.weights ? problem.weights[i] : 1; }
  int64_t partner(int64_t i) const { return i < batch ? i + batch : i - batch; }
  T* buffer(int64_t worker) const { return buffers + worker * KEYS * width; }

  void pack_group(int64_t first, int64_t size, const Threads& threads) const {
    for_each(threads, up(size, WIDE) / WIDE, [&](int64_t panel, int64_t worker) {
      const int64_t start = panel * WIDE;
      pack_queries(rows, first + start, least(WIDE, size - start), buffer(worker), packed_queries + start * width);
    });
  }

  // A row's logit with itself, and those of the lanes that hold no row.
  void leave_out(T* chunk, int64_t block, int64_t start, int64_t end) const {
    for (int64_t lane = 0; lane < WIDE; ++lane) {
      const int64_t i = start + lane;
      if (i >= end) {
        for (int64_t j = 0; j < keys_of(block); ++j) chunk[j * WIDE + lane] = (T)-__builtin_inf();
      // fault: i / KEYS == block -> i / KEYS == block && i > 0
      } else if (i / KEYS == block) {
        chunk[(i - block * KEYS) * WIDE + lane] = (T)-__builtin_inf();
      }
    }
  }

  void find_positives(const T* chunk, int64_t block, int64_t start, int64_t end) const {
    for (int64_t i = start; i < least(start + WIDE, end); ++i) {
      const int64_t j = partner(i);
      if (j / KEYS != block) continue;
      positive[i] = chunk[(j - block * KEYS) * WIDE + i - start];
      // fault: j >= end -> false
      if (j >= end) positive[j] = positive[i];
    }
  }

  // First pass: largest, total and positive of every row.
  void sums(int64_t first, const Threads& threads) const {
    const int64_t size = least(group, count - first), panels = up(size, WIDE) / WIDE, lanes = panels * WIDE;
    const int64_t own = first / KEYS, beyond = up(first + size, KEYS) / KEYS, pitch = KEYS * WIDE;
    pack_group(first, size, threads);
    for_each(threads, blocks - own, [&](int64_t index, int64_t worker) {
      const int64_t block = own + index, keys = keys_of(block);
      const T* left = rows.block(block * KEYS, keys, buffer(worker));
      T* const chunk = chunks + worker * up(group, WIDE) * KEYS;
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t start = first + panel * WIDE;
        logits(left, keys, width, packed_queries + panel * WIDE * width, chunk + panel * pitch);
        find_positives(chunk + panel * pitch, block, start, first + size);
        if (block < beyond || panel == panels - 1) leave_out(chunk + panel * pitch, block, start, first + size);
      }
      if (block >= beyond) {
        for (int64_t j = 0; j < keys; ++j) {  // the group's part in the sum of row j
          T top;
          const double sum = sum_across(chunk + j * WIDE, panels, pitch, scale, top);
          join(top, sum, problem.temperature, largest[block * KEYS + j], total[block * KEYS + j]);
        }
      }
      for (int64_t panel = 0; panel < panels; ++panel) {
        T* const top = largest_of + block * lanes + panel * WIDE;
        for (int64_t lane = 0; lane < WIDE; ++lane) top[lane] = LOWEST<T>;
        raise(chunk + panel * pitch, keys, top);
        exponentials(chunk + panel * pitch, keys, top, scale, sums_of + block * lanes + panel * WIDE);
      }
    });
    for (int64_t i = 0; i < size; ++i) {
      for (int64_t block = own; block < blocks; ++block) {
        join(largest_of[block * lanes + i], (double)sums_of[block * lanes + i], problem.temperature,
             largest[first + i], total[first + i]);
      }
    }
  }

  // Second pass: the gradients.
  void gradients_of(int64_t first, const Threads& threads) const {
    const int64_t size = least(group, count - first), panels = up(size, WIDE) / WIDE;
    const int64_t beyond = up(first + size, KEYS) / KEYS, pitch = kept_rows() * WIDE;
    pack_group(first, size, threads);
    for_each(threads, panels, [&](int64_t panel, int64_t worker) {
      const int64_t start = panel * WIDE, of_panel = least(WIDE, size - start);
      const T* block = rows.block(first + start, of_panel, buffer(worker));
      for (int64_t lane = 0; lane < WIDE; ++lane) {
        for (int64_t c = 0; c < up(width, WIDE); ++c) {
          plain_queries[c / WIDE * panels * WIDE * WIDE + (start + lane) * WIDE + c % WIDE] =
              lane < of_panel && c < width ? block[lane * width + c] : 0;
        }
      }
    });
    for (int64_t i = 0; i < panels * own_size(); ++i) own[i] = 0;
    const int64_t together = panels / threads.workers;
    const int64_t of_task = together < 1 ? 1 : least(together, PANELS);
    for (int64_t start = first / KEYS; start < blocks; start += span) {
      const int64_t of_span = least(span, blocks - start);
      for_each(threads, of_span, [&](int64_t index, int64_t worker) {
        const int64_t block = start + index, keys = keys_of(block);
        const T* left = rows.block(block * KEYS, keys, buffer(worker));
        if (first == 0) {  // this group meets all blocks
          T* const packed = packed_keys + block * KEYS * up(width, TILE_ROWS);
          pack_columns<TILE_ROWS>(packed, KEYS * TILE_ROWS, left, keys, width);
        }
        T* const chunk = kept + index * KEYS * WIDE;
        for (int64_t panel = 0; panel < panels; ++panel) {
          logits(left, keys, width, packed_queries + panel * WIDE * width, chunk + panel * pitch);
          weigh(chunk + panel * pitch, block, first + panel * WIDE, first + size);
        }
        if (block >= beyond) {
          key_gradient(chunk, panels, pitch, keys, plain_queries, width, gradient + block * KEYS * width);
        }
      });
      for_each(threads, up(panels, of_task) / of_task, [&](int64_t task, int64_t) {
        own_gradients(start, of_span, task * of_task, least(of_task, panels - task * of_task), pitch);
      });
    }
    for_each(threads, panels, [&](int64_t panel, int64_t) {
      for (int64_t i = panel * WIDE; i < least(size, (panel + 1) * WIDE); ++i) {
        const T* column = own + panel * own_size() + i % WIDE;
        // fault: (first + i) -> (i)
        for (int64_t c = 0; c < width; ++c) gradient[(first + i) * width + c] += column[c * WIDE];
      }
    });
  }

  // Adds to the gradients of the group's own rows, some panels of them, what a span of blocks gives.
  void own_gradients(int64_t block, int64_t of_span, int64_t start, int64_t panels, int64_t pitch) const {
    for (int64_t index = 0; index < of_span; ++index) {
      for (int64_t panel = start; panel < start + panels; ++panel) {
        query_gradient<true, KEYS>(packed_keys + (block + index) * KEYS * up(width, TILE_ROWS), keys_of(block + index),
                             kept + panel * pitch + index * KEYS * WIDE, width, own + panel * own_size());
      }
    }
  }

  // chunk = w_ij = weight_i exp((s_ij - largest_i) / t) + the same of j, less what the positives take away.
  void weigh(T* chunk, int64_t block, int64_t start, int64_t end) const {
    using W = Wide<T>;
    T top[WIDE], by[WIDE];
    for (int64_t lane = 0; lane < WIDE; ++lane) {
      top[lane] = start + lane < end ? largest[start + lane] : 0;
      by[lane] = start + lane < end ? weight[start + lane] : 0;
    }
    leave_out(chunk, block, start, end);
    const int64_t keys = keys_of(block);
    for (int half = 0; half < 2; ++half) {
      const auto tops = W::load(top + half * W::LANES), weights = W::load(by + half * W::LANES);
      for (int64_t j = 0; j < keys; ++j) {
        T* const at = chunk + j * WIDE + half * W::LANES;
        const auto s = W::load(at);
        const auto of_i = exp_of<T>((s - tops) * scale), of_j = exp_of<T>((s - largest[block * KEYS + j]) * scale);
        W::store(at, of_i * weights + of_j * weight[block * KEYS + j]);
      }
    }
    for (int64_t i = keys * WIDE; i < up(keys, TILE_ROWS) * WIDE; ++i) chunk[i] = 0;
    for (int64_t i = start; i < least(start + WIDE, end); ++i) {
      const int64_t j = partner(i);
      if (j / KEYS == block) {
        chunk[(j - block * KEYS) * WIDE + i - start] -=
            (T)((given_weight(i) + given_weight(j)) / problem.temperature);
      }
    }
  }

  void solve(const Threads& threads) const {
    for (int64_t i = 0; i < count; ++i) {
      largest[i] = LOWEST<T>;
      positive[i] = 0;
      total[i] = 0;
    }
    for (int64_t first = 0; first < count; first += group) sums(first, threads);
    for (int64_t i = 0; i < count; ++i) {
      // A total of 0 is one of logits that are all -inf: 0 / 0.
      const double sum = total[i] == 0 ? __builtin_nan("") : total[i];
      losses[i] = (T)(__builtin_log(sum) + ((double)largest[i] - (double)positive[i]) / problem.temperature);
      weight[i] = (T)(given_weight(i) / (problem.temperature * sum));
    }
    if (!gradient) return;
    for (int64_t i = 0; i < count * width; ++i) gradient[i] = 0;
    for (int64_t first = 0; first < count; first += group) gradients_of(first, threads);
  }
};

template <class T>
int64_t solve(const NTXentProblem& problem, const Threads& threads, void* memory) {
  const NTXent<T> solver(problem, threads.workers, (char*)memory);
  if (memory) solver.solve(threads);
  return solver.used;
}

}  // namespace

int64_t nt_xent(const NTXentProblem& problem, const Threads& threads, void* memory) {
  return problem.wide ? solve<double>(problem, threads, memory) : solve<float>(problem, threads, memory);
}

}  // namespace fedkernels::FEDKERNELS_ISA
