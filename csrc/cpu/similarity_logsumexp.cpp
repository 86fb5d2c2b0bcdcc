// One product gives both log-sum-exps: a block's sums over the keys lie lane by lane, those over the queries across
// its chunks. The gradients form the logits again, to the last bit as before, and with the log-sum-exps every weight is
// known at once: three products.
#include "cpu/similarity_logsumexp.h"

#include "cpu/all_logits.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr double INFINITE = __builtin_inf();

// A weight times exp(logit - of), where `of` is more precise than the logits: exp(logit - top) * by.
template <class T>
struct Weight {
  T top = 0, by = 0;

  Weight() = default;
  Weight(double of, double weight) {
    // Where nothing but -inf was summed there is nothing to weigh, and -inf - -inf must not be formed.
    if (of == -INFINITE) return;
    top = (T)of;
    by = (T)(weight * __builtin_exp((double)top - of));
  }
};

template <class T>
struct Similarity {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>, KEYS = AllLogits<T>::KEYS;
  using Block = typename AllLogits<T>::Block;

  const SimilarityProblem& problem;
  const SimilarityGradients* gradients;
  AllLogits<T> all;
  T *largest_of, *sums_of, *largest;  // [blocks, group] of the queries, [keys] of the keys
  double* total;                      // [keys]
  Weight<T>* of_keys;                 // [keys]

  Similarity(const SimilarityProblem& problem, const SimilarityGradients* gradients, Memory& memory, int64_t workers)
      : problem(problem),
        gradients(gradients),
        all(memory, problem.query, problem.key, problem.queries, problem.keys, problem.width,
            gradients ? (T*)gradients->query_gradient : nullptr, gradients ? (T*)gradients->key_gradient : nullptr,
            workers) {
    const int64_t of_group = gradients ? 0 : all.blocks * all.group, of_columns = gradients ? 0 : problem.keys;
    largest_of = memory.take<T>(problem.rows ? of_group : 0);
    sums_of = memory.take<T>(problem.rows ? of_group : 0);
    largest = memory.take<T>(problem.columns ? of_columns : 0);
    total = memory.take<double>(problem.columns ? of_columns : 0);
    of_keys = memory.take<Weight<T>>(gradients && gradients->column_weights ? problem.keys : 0);
  }

  // The key of a query within the block, or -1.
  int64_t positive_in(const Block& b, int64_t query) const {
    if (!problem.positives) return -1;
    const int64_t j = problem.positives[query] - b.block * KEYS;
    return j >= 0 && j < b.keys ? j : -1;
  }

  // Logits of pairs that are left out become -inf, and those of the lanes that hold no query; a positive stays.
  void leave_out(const Block& b, int64_t panel) const {
    T* const chunk = b.chunk(panel);
    const int64_t start = b.first + panel * WIDE, size = least(WIDE, b.first + b.queries - start);
    if (problem.query_labels || problem.excluded) {
      T kept[WIDE];
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t j = positive_in(b, start + lane);
        if (j >= 0) kept[lane] = chunk[j * WIDE + lane];
      }
      if (problem.query_labels) leave_out_equal_labels(b, chunk, start, size);
      if (problem.excluded) {
        for (int64_t lane = 0; lane < size; ++lane) {
          // fault: + b.block * KEYS; -> ;
          const bool* row = problem.excluded + (start + lane) * problem.keys + b.block * KEYS;
          for (int64_t j = 0; j < b.keys; ++j) {
            if (row[j]) chunk[j * WIDE + lane] = (T)-INFINITE;
          }
        }
      }
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t j = positive_in(b, start + lane);
        // fault: j >= 0 -> j > 0
        if (j >= 0) chunk[j * WIDE + lane] = kept[lane];
      }
    }
    for (int64_t lane = size; lane < WIDE; ++lane) {
      for (int64_t j = 0; j < b.keys; ++j) chunk[j * WIDE + lane] = (T)-INFINITE;
    }
  }

  void leave_out_equal_labels(const Block& b, T* chunk, int64_t start, int64_t size) const {
    int64_t labels[WIDE];
    for (int64_t lane = 0; lane < WIDE; ++lane) {
      labels[lane] = problem.query_labels[start + (lane < size ? lane : 0)];  // a lane that holds no query: any label
    }
    const int64_t* of_keys = problem.key_labels + b.block * KEYS;
    for (int64_t j = 0; j < b.keys; ++j) {
      T* const at = chunk + j * WIDE;
      // fault: labels[lane] == -> labels[0] ==
      for (int64_t lane = 0; lane < WIDE; ++lane) at[lane] = labels[lane] == of_keys[j] ? (T)-INFINITE : at[lane];
    }
  }

  void sum(const Threads& threads) const {
    for (int64_t j = 0; problem.columns && j < problem.keys; ++j) {
      largest[j] = LOWEST<T>;
      total[j] = 0;
    }
    all.visit(
        threads, [&](const Block& b) { sum_block(b); },
        [&](int64_t first, int64_t count) {
          const int64_t lanes = up(count, WIDE);
          for (int64_t i = 0; problem.rows && i < count; ++i) {
            T top = LOWEST<T>;
            double sum = 0;
            for (int64_t block = 0; block < all.blocks; ++block) {
              join<T>(largest_of[block * lanes + i], (double)sums_of[block * lanes + i], 1, top, sum);
            }
            problem.rows[first + i] = __builtin_log(sum) + (double)top;
          }
        });
    for (int64_t j = 0; problem.columns && j < problem.keys; ++j) {
      problem.columns[j] = __builtin_log(total[j]) + (double)largest[j];
    }
  }

  void sum_block(const Block& b) const {
    for (int64_t panel = 0; panel < b.panels; ++panel) {
      const int64_t start = b.first + panel * WIDE;
      for (int64_t lane = 0; lane < least(WIDE, b.first + b.queries - start); ++lane) {
        const int64_t j = positive_in(b, start + lane);
        if (j >= 0) problem.positive_logits[start + lane] = (double)b.chunk(panel)[j * WIDE + lane];
      }
      leave_out(b, panel);
    }
    for (int64_t j = 0; problem.columns && j < b.keys; ++j) {
      T top;
      const double sum = sum_across(b.chunks + j * WIDE, b.panels, b.pitch, (T)1, top);
      join<T>(top, sum, 1, largest[b.block * KEYS + j], total[b.block * KEYS + j]);
    }
    for (int64_t panel = 0; problem.rows && panel < b.panels; ++panel) {
      const int64_t at = (b.block * b.panels + panel) * WIDE;
      for (int64_t lane = 0; lane < WIDE; ++lane) largest_of[at + lane] = LOWEST<T>;
      raise(b.chunk(panel), b.keys, largest_of + at);
      exponentials(b.chunk(panel), b.keys, largest_of + at, (T)1, sums_of + at);
    }
  }

  void weigh(const Threads& threads) const {
    for (int64_t j = 0; gradients->column_weights && j < problem.keys; ++j) {
      of_keys[j] = Weight<T>(problem.columns[j], gradients->column_weights[j]);
    }
    all.visit(
        threads,
        [&](const Block& b) {
          for (int64_t panel = 0; panel < b.panels; ++panel) weigh_panel(b, panel);
        },
        [](int64_t, int64_t) {});
  }

  void weigh_panel(const Block& b, int64_t panel) const {
    using W = Wide<T>;
    T* const chunk = b.chunk(panel);
    const int64_t start = b.first + panel * WIDE, size = least(WIDE, b.first + b.queries - start);
    leave_out(b, panel);
    T top[WIDE] = {}, by[WIDE] = {};
    for (int64_t lane = 0; gradients->row_weights && lane < size; ++lane) {
      const Weight<T> weight(problem.rows[start + lane], gradients->row_weights[start + lane]);
      top[lane] = weight.top;
      by[lane] = weight.by;
    }
    const Weight<T>* const of_block = gradients->column_weights ? of_keys + b.block * KEYS : nullptr;
    for (int half = 0; half < 2; ++half) {
      const auto tops = W::load(top + half * W::LANES), weights = W::load(by + half * W::LANES);
      for (int64_t j = 0; j < b.keys; ++j) {
        T* const at = chunk + j * WIDE + half * W::LANES;
        const auto logit = W::load(at);
        typename W::Type sum{};
        if (gradients->row_weights) sum = exp_of<T>(logit - tops) * weights;
        if (of_block) sum += exp_of<T>(logit - of_block[j].top) * of_block[j].by;
        W::store(at, sum);
      }
    }
    for (int64_t i = b.keys * WIDE; i < up(b.keys, TILE_ROWS) * WIDE; ++i) chunk[i] = 0;
    for (int64_t lane = 0; gradients->positive_weights && lane < size; ++lane) {
      const int64_t j = positive_in(b, start + lane);
      if (j >= 0) chunk[j * WIDE + lane] += (T)gradients->positive_weights[start + lane];
    }
    // A lane that holds no query must give the keys nothing, also where a key is NaN.
    for (int64_t lane = size; lane < WIDE; ++lane) {
      for (int64_t j = 0; j < b.keys; ++j) chunk[j * WIDE + lane] = 0;
    }
  }
};

template <class T>
int64_t solve(const SimilarityProblem& problem, const SimilarityGradients* gradients, const Threads& threads,
              void* at) {
  Memory memory{(char*)at};
  const Similarity<T> similarity(problem, gradients, memory, threads.workers);
  if (at && gradients) similarity.weigh(threads);
  if (at && !gradients) similarity.sum(threads);
  return memory.used;
}

}  // namespace

int64_t similarity_logsumexp(const SimilarityProblem& problem, const SimilarityGradients* gradients,
                             const Threads& threads, void* memory) {
  return problem.wide ? solve<double>(problem, gradients, threads, memory)
                      : solve<float>(problem, gradients, threads, memory);
}

}  // namespace fedkernels::FEDKERNELS_ISA
