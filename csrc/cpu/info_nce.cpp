// The logits are formed block by block and used while they are in the cache. Without a gradient in the keys a group of
// queries meets one block of keys after another, with a running maximum, and never more than KEYS x TILE_COLUMNS logits
// exist per thread: two products. A gradient in the keys needs p_ij, thus the sum over all keys, before any p_ij can be
// used: then the exponentials of a group of queries against all keys are kept, and three products are enough.
#include "cpu/info_nce.h"

#include "cpu/logits.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

// Keys in a block: of so many a chunk leaves room in the first-level cache, also where two hardware threads share it.
constexpr int64_t KEYS = 128 / TILE_ROWS * TILE_ROWS;

template <class T>
struct InfoNCE {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>;

  const InfoNCEProblem& problem;
  Rows<T> query, key;
  int64_t width, blocks;
  T scale;  // 1 / temperature
  T *losses, *to_query, *to_key;

  InfoNCE(const InfoNCEProblem& problem) : problem(problem), width(problem.width) {
    scale = inverse<T>(problem.temperature);
    query = {problem.query, problem.query, problem.queries, width};
    key = {problem.key, problem.key, problem.keys, width};
    blocks = up(problem.keys, KEYS) / KEYS;
    losses = (T*)problem.losses;
    to_query = (T*)problem.query_gradient;
    to_key = (T*)problem.key_gradient;
  }

  int64_t keys_of(int64_t block) const { return least(KEYS, problem.keys - block * KEYS); }
  double weight(int64_t i) const { return problem.weights ? problem.weights[i] : 1; }

  // The logit of each query in the panel with its own key, where that key is in the block.
  void find_positives(const T* chunk, int64_t block, int64_t first, T* positives) const {
    for (int64_t lane = 0; lane < WIDE; ++lane) {
      const int64_t j = first + lane - block * KEYS;
      if (j >= 0 && j < keys_of(block)) positives[lane] = chunk[j * WIDE + lane];
    }
  }

  // log(sum_j exp((s_j - largest) / t)) + (largest - s_positive) / t: nothing is rounded to the size of the logits.
  // A total of 0 is one of logits that are all -inf: 0 / 0.
  T loss(double total, T largest, T positive) const {
    if (total == 0) return (T)__builtin_nan("");
    return (T)(__builtin_log(total) + ((double)largest - (double)positive) / problem.temperature);
  }

  // Without a gradient in the keys.

  struct Running {
    T largest[WIDE], positive[WIDE];
    double total[WIDE];
  };
  struct Group {  // of one worker
    T *keys, *packed_keys, *packed_queries, *chunk, *gradient;
    Running* running;
  };

  int64_t group_size(int64_t workers) const {
    const int64_t share = up((problem.queries + 4 * workers - 1) / (4 * workers), WIDE);
    return share < 512 ? share : 512;
  }

  Group group_memory(Memory& memory, int64_t size) const {
    return {memory.take<T>(KEYS * width), memory.take<T>(to_query ? up(width, TILE_ROWS) * KEYS : 0),
            memory.take<T>(size * width),      memory.take<T>(KEYS * WIDE),
            memory.take<T>(to_query ? size * up(width, TILE_ROWS) : 0), memory.take<Running>(size / WIDE)};
  }

  void group_of_queries(int64_t first, int64_t count, const Group& own) const {
    const int64_t panels = up(count, WIDE) / WIDE, room = up(width, TILE_ROWS) * WIDE;
    pack_queries(query, first, count, own.keys, own.packed_queries);
    for (int64_t panel = 0; panel < panels; ++panel) {
      Running& now = own.running[panel];
      for (int64_t lane = 0; lane < WIDE; ++lane) {
        now.largest[lane] = LOWEST<T>;
        now.positive[lane] = 0;
        now.total[lane] = 0;
      }
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t size = keys_of(block);
      const T* keys = key.block(block * KEYS, size, own.keys);
      if (to_query) pack_columns<TILE_ROWS>(own.packed_keys, KEYS * TILE_ROWS, keys, size, width);
      for (int64_t panel = 0; panel < panels; ++panel) {
        Running& now = own.running[panel];
        logits(keys, size, width, own.packed_queries + panel * WIDE * width, own.chunk);
        find_positives(own.chunk, block, first + panel * WIDE, now.positive);
        T* const gradient = own.gradient + panel * room;
        // fault: block > 0 -> block > 1
        meet(own.chunk, size, now, to_query && block > 0 ? gradient : nullptr);
        if (!to_query) continue;
        if (block == 0) {
          query_gradient<false, KEYS>(own.packed_keys, size, own.chunk, width, gradient);
        } else {
          query_gradient<true, KEYS>(own.packed_keys, size, own.chunk, width, gradient);
        }
      }
    }
    for (int64_t panel = 0; panel < panels; ++panel) finish(first + panel * WIDE, panel, own);
  }

  // Exponentials of a chunk relative to the largest logit so far; what was summed before is scaled to it.
  void meet(T* chunk, int64_t size, Running& now, T* gradient) const {
    using W = Wide<T>;
    T before[WIDE], factor[WIDE], sums[WIDE];
    __builtin_memcpy(before, now.largest, sizeof before);
    raise(chunk, size, now.largest);
    bool same = true;
    for (int half = 0; half < 2; ++half) {
      const int64_t at = half * W::LANES;
      W::store(factor + at, exp_of<T>((W::load(before + at) - W::load(now.largest + at)) * scale));
    }
    exponentials(chunk, size, now.largest, scale, sums);
    for (int64_t lane = 0; lane < WIDE; ++lane) {
      // fault: * (double)factor[lane] + -> +
      now.total[lane] = now.total[lane] * (double)factor[lane] + (double)sums[lane];
      same &= factor[lane] == 1;
    }
    if (!gradient || same) return;
    for (int half = 0; half < 2; ++half) {
      const auto by = W::load(factor + half * W::LANES);
      for (int64_t c = 0; c < up(width, TILE_ROWS); ++c) {
        T* const at = gradient + c * WIDE + half * W::LANES;
        W::store(at, W::load(at) * by);
      }
    }
  }

  void finish(int64_t first, int64_t panel, const Group& own) const {
    const Running& now = own.running[panel];
    const int64_t count = least(WIDE, problem.queries - first);
    const T* gradient = own.gradient + panel * up(width, TILE_ROWS) * WIDE;
    for (int64_t lane = 0; lane < count; ++lane) {
      losses[first + lane] = loss(now.total[lane], now.largest[lane], now.positive[lane]);
    }
    if (!to_query) return;
    const T* positives = key.block(first, count, own.keys);
    for (int64_t lane = 0; lane < count; ++lane) {
      const T by = (T)(weight(first + lane) / problem.temperature), share = (T)(1 / now.total[lane]);
      T* const row = to_query + (first + lane) * width;
      for (int64_t c = 0; c < width; ++c) {
        row[c] = (gradient[c * WIDE + lane] * share - positives[lane * width + c]) * by;
      }
    }
  }

  // With a gradient in the keys.

  // A multiple of WIDE whose exponentials take 8 MiB; but no less than 128, which make up for packing the keys.
  int64_t kept_queries() const {
    const int64_t most = (1 << 23) / (int64_t)sizeof(T) / problem.keys;
    return least(up(problem.queries, WIDE), most < 128 ? up(128, WIDE) : most > 512 ? 512 : most / WIDE * WIDE);
  }

  struct Shared {
    T *packed_queries, *weighted_queries, *exponentials, *packed_keys, *positive, *largest, *largest_of, *sums_of;
    double* total;
    T *buffer, *gradient;  // of the workers, one behind another
  };

  static constexpr int64_t PANELS = 4;  // of queries whose gradients share one reading of the keys

  int64_t buffer_size() const { return up(KEYS * width, 16); }
  int64_t gradient_size() const { return up(width, TILE_ROWS) * WIDE * PANELS; }

  Shared shared_memory(Memory& memory, int64_t workers) const {
    const int64_t size = kept_queries();
    return {memory.take<T>(size * width),
            memory.take<T>(size * up(width, WIDE)),
            memory.take<T>(size * up(problem.keys, TILE_ROWS)),
            memory.take<T>(to_query ? blocks * KEYS * up(width, TILE_ROWS) : 0),
            memory.take<T>(size),
            memory.take<T>(size),
            memory.take<T>(blocks * size),
            memory.take<T>(blocks * size),
            memory.take<double>(size),
            memory.take<T>(workers * buffer_size()),
            memory.take<T>(to_query ? workers * gradient_size() : 0)};
  }

  void kept_group(int64_t first, int64_t count, const Threads& threads, const Shared& s) const {
    const int64_t panels = up(count, WIDE) / WIDE, lanes = panels * WIDE;
    const int64_t pitch = up(problem.keys, TILE_ROWS) * WIDE;  // from panel to panel of the exponentials
    for_each(threads, panels, [&](int64_t panel, int64_t worker) {
      const int64_t start = panel * WIDE;
      pack_queries(query, first + start, least(WIDE, count - start), s.buffer + worker * buffer_size(),
                   s.packed_queries + start * width);
    });
    for_each(threads, blocks, [&](int64_t block, int64_t worker) {
      const int64_t size = keys_of(block);
      const T* keys = key.block(block * KEYS, size, s.buffer + worker * buffer_size());
      if (to_query && first == 0) {
        T* const packed = s.packed_keys + block * KEYS * up(width, TILE_ROWS);
        pack_columns<TILE_ROWS>(packed, KEYS * TILE_ROWS, keys, size, width);
      }
      for (int64_t panel = 0; panel < panels; ++panel) {
        T* const chunk = s.exponentials + panel * pitch + block * KEYS * WIDE;
        T* const largest = s.largest_of + block * lanes + panel * WIDE;
        logits(keys, size, width, s.packed_queries + panel * WIDE * width, chunk);
        find_positives(chunk, block, first + panel * WIDE, s.positive + panel * WIDE);
        for (int64_t lane = 0; lane < WIDE; ++lane) largest[lane] = LOWEST<T>;
        raise(chunk, size, largest);
      }
    });
    for (int64_t i = 0; i < lanes; ++i) {
      T top = s.largest_of[i];
      for (int64_t block = 1; block < blocks; ++block) {
        const T other = s.largest_of[block * lanes + i];
        top = other > top ? other : top;
      }
      s.largest[i] = top;
    }
    for_each(threads, blocks, [&](int64_t block, int64_t) {
      for (int64_t panel = 0; panel < panels; ++panel) {
        T* const chunk = s.exponentials + panel * pitch + block * KEYS * WIDE;
        exponentials(chunk, keys_of(block), s.largest + panel * WIDE, scale, s.sums_of + block * lanes + panel * WIDE);
        // A lane that holds no query has the logits 0 * key, which may be NaN: it must give the keys nothing.
        // fault: panel * WIDE; -> panel * WIDE + 1;
        for (int64_t lane = count - panel * WIDE; lane < WIDE; ++lane) {
          for (int64_t j = 0; j < keys_of(block); ++j) chunk[j * WIDE + lane] = 0;
        }
      }
    });
    for (int64_t i = 0; i < lanes; ++i) {
      s.total[i] = 0;
      for (int64_t block = 0; block < blocks; ++block) s.total[i] += (double)s.sums_of[block * lanes + i];
    }
    for (int64_t i = 0; i < count; ++i) {
      losses[first + i] = loss(s.total[i], s.largest[i], s.positive[i]);
      // (p - 1) of the positive: the gradients need no second look at it.
      s.exponentials[i / WIDE * pitch + (first + i) * WIDE + i % WIDE] -= (T)s.total[i];
    }
    weigh_queries(first, count, panels, threads, s);

    const int64_t of_query = to_query ? up(panels, PANELS) / PANELS : 0;
    for_each(threads, of_query + blocks, [&](int64_t index, int64_t worker) {
      if (index < of_query) {
        const int64_t start = index * PANELS;
        gradients_of_panels(first, count, start, least(PANELS, panels - start), pitch, s,
                            s.gradient + worker * gradient_size());
      } else {
        const int64_t block = index - of_query;
        key_gradient(s.exponentials + block * KEYS * WIDE, panels, pitch, keys_of(block), s.weighted_queries, width,
                     to_key + block * KEYS * width);
      }
    });
  }

  // The queries as the right side of the keys' gradient, each by its weight / (temperature * total).
  void weigh_queries(int64_t first, int64_t count, int64_t panels, const Threads& threads, const Shared& s) const {
    const int64_t room = panels * WIDE * WIDE;  // from panel of columns to panel
    for_each(threads, panels, [&](int64_t panel, int64_t worker) {
      const int64_t start = panel * WIDE, size = least(WIDE, count - start);
      T* const buffer = s.buffer + worker * buffer_size();
      const T* rows = query.block(first + start, size, buffer);
      for (int64_t lane = 0; lane < WIDE; ++lane) {
        const int64_t i = start + lane;
        // fault: weight(first + i) -> weight(i)
        const T by = lane < size ? (T)(weight(first + i) / (problem.temperature * s.total[i])) : 0;
        for (int64_t c = 0; c < up(width, WIDE); ++c) {
          s.weighted_queries[c / WIDE * room + i * WIDE + c % WIDE] =
              lane < size && c < width ? rows[lane * width + c] * by : 0;
        }
      }
    });
  }

  void gradients_of_panels(int64_t first, int64_t count, int64_t start, int64_t panels, int64_t pitch, const Shared& s,
                           T* gradient) const {
    const int64_t room = up(width, TILE_ROWS) * WIDE;
    for (int64_t block = 0; block < blocks; ++block) {
      const T* keys = s.packed_keys + block * KEYS * up(width, TILE_ROWS);
      for (int64_t panel = 0; panel < panels; ++panel) {
        const T* chunk = s.exponentials + (start + panel) * pitch + block * KEYS * WIDE;
        if (block == 0) {
          query_gradient<false, KEYS>(keys, keys_of(block), chunk, width, gradient + panel * room);
        } else {
          query_gradient<true, KEYS>(keys, keys_of(block), chunk, width, gradient + panel * room);
        }
      }
    }
    for (int64_t i = start * WIDE; i < least(count, (start + panels) * WIDE); ++i) {
      const T by = (T)(weight(first + i) / (problem.temperature * s.total[i]));
      const T* own = gradient + (i / WIDE - start) * room + i % WIDE;
      for (int64_t c = 0; c < width; ++c) to_query[(first + i) * width + c] = own[c * WIDE] * by;
    }
  }
};

template <class T>
int64_t solve(const InfoNCEProblem& problem, const Threads& threads, char* at) {
  const InfoNCE<T> solver(problem);
  Memory memory{at};
  if (solver.to_key) {
    const auto shared = solver.shared_memory(memory, threads.workers);
    if (!at) return memory.used;
    for (int64_t i = 0; i < problem.keys * problem.width; ++i) solver.to_key[i] = 0;
    const int64_t group = solver.kept_queries();
    for (int64_t first = 0; first < problem.queries; first += group) {
      solver.kept_group(first, least(group, problem.queries - first), threads, shared);
    }
    return memory.used;
  }
  const int64_t group = solver.group_size(threads.workers);
  solver.group_memory(memory, group);
  const int64_t each = up(memory.used, 64);
  if (!at) return each * threads.workers;
  for_each(threads, up(problem.queries, group) / group, [&](int64_t index, int64_t worker) {
    Memory own{at + worker * each};
    const int64_t first = index * group;
    solver.group_of_queries(first, least(group, problem.queries - first), solver.group_memory(own, group));
  });
  return each * threads.workers;
}

}  // namespace

int64_t info_nce(const InfoNCEProblem& problem, const Threads& threads, void* memory) {
  return problem.wide ? solve<double>(problem, threads, (char*)memory) : solve<float>(problem, threads, (char*)memory);
}

}  // namespace fedkernels::FEDKERNELS_ISA
