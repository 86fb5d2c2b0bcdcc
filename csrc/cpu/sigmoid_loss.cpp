// Each logit's loss and weight depend on nothing else, so one pass over the logits gives the loss and both gradients:
// three products.
#include "cpu/sigmoid_loss.h"

#include "cpu/all_logits.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

// log(1 + e) for e from 0 to 1: 2 atanh(e / (2 + e)), by its series. The argument is at most 1/3, so a term is at most
// a ninth of the one before.
template <class T>
static inline typename Wide<T>::Type log1p_of(typename Wide<T>::Type e) {
  constexpr int TERMS = sizeof(T) == 8 ? 17 : 8;
  constexpr struct Series {
    T of[TERMS];
    constexpr Series() : of{} {
      for (int k = 0; k < TERMS; ++k) of[k] = (T)2 / (2 * k + 1);
    }
  } series;
  const auto u = e / (e + (T)2), square = u * u;
  auto sum = Wide<T>::splat(series.of[TERMS - 1]);
#pragma GCC unroll 32
  for (int k = TERMS - 2; k >= 0; --k) sum = sum * square + series.of[k];
  return sum * u;
}

template <class T>
struct SigmoidLoss {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>, KEYS = AllLogits<T>::KEYS;
  using Block = typename AllLogits<T>::Block;

  const SigmoidLossProblem& problem;
  AllLogits<T> all;
  double* sums_of;  // [blocks, group]

  SigmoidLoss(const SigmoidLossProblem& problem, Memory& memory, int64_t workers)
      : problem(problem),
        all(memory, problem.query, problem.key, problem.batch, problem.batch, problem.width,
            (T*)problem.query_gradient, (T*)problem.key_gradient, workers) {
    sums_of = memory.take<double>(all.blocks * all.group);
  }

  void solve(const Threads& threads) const {
    all.visit(
        threads,
        [&](const Block& b) {
          for (int64_t panel = 0; panel < b.panels; ++panel) weigh(b, panel);
        },
        [&](int64_t first, int64_t count) {
          for (int64_t i = 0; i < count; ++i) {
            double sum = 0;
            for (int64_t block = 0; block < all.blocks; ++block) sum += sums_of[block * up(count, WIDE) + i];
            problem.losses[first + i] = sum;
          }
        });
  }

  // A pair's loss is log(1 + exp(x)), its weight 1 / (1 + exp(-x)); a positive pair's is log(1 + exp(-x)).
  void weigh(const Block& b, int64_t panel) const {
    using W = Wide<T>;
    T* const chunk = b.chunk(panel);
    const int64_t start = b.first + panel * WIDE, size = least(WIDE, b.first + b.queries - start);
    T positive[WIDE];
    for (int64_t lane = 0; lane < size; ++lane) {
      const int64_t j = start + lane - b.block * KEYS;
      if (j < 0 || j >= b.keys) continue;
      positive[lane] = chunk[j * WIDE + lane];
      chunk[j * WIDE + lane] = (T)-__builtin_inf();  // adds nothing to the sums: they must not be rounded to it
    }
    T sums[WIDE];
    for (int half = 0; half < 2; ++half) {
      typename W::Type sum{};
      for (int64_t j = 0; j < b.keys; ++j) {
        T* const at = chunk + j * WIDE + half * W::LANES;
        const auto x = W::load(at);
        const auto e = exp_of<T>(x < 0 ? x : -x), share = (T)1 / (e + (T)1);
        sum += (x > 0 ? x : typename W::Type{}) + log1p_of<T>(e);
        W::store(at, x < 0 ? e * share : share);
      }
      W::store(sums + half * W::LANES, sum);
    }
    for (int64_t i = b.keys * WIDE; i < up(b.keys, TILE_ROWS) * WIDE; ++i) chunk[i] = 0;
    for (int64_t lane = 0; lane < WIDE; ++lane) {
      double& sum = sums_of[(b.block * b.panels + panel) * WIDE + lane];
      sum = (double)sums[lane];
      if (lane >= size) {  // no query: it must give the keys nothing
        for (int64_t j = 0; j < b.keys; ++j) chunk[j * WIDE + lane] = 0;
        continue;
      }
      const int64_t j = start + lane - b.block * KEYS;
      if (j < 0 || j >= b.keys) continue;
      const double x = (double)positive[lane], e = __builtin_exp(x < 0 ? x : -x);
      sum += (x < 0 ? -x : 0) + __builtin_log1p(e);
      // fault: x < 0 ? 1 : e -> x < 0 ? e : 1
      chunk[j * WIDE + lane] = (T)(-(x < 0 ? 1 : e) / (1 + e));
    }
  }
};

template <class T>
int64_t solve(const SigmoidLossProblem& problem, const Threads& threads, void* at) {
  Memory memory{(char*)at};
  const SigmoidLoss<T> loss(problem, memory, threads.workers);
  if (at) loss.solve(threads);
  return memory.used;
}

}  // namespace

int64_t sigmoid_loss(const SigmoidLossProblem& problem, const Threads& threads, void* memory) {
  return problem.wide ? solve<double>(problem, threads, memory) : solve<float>(problem, threads, memory);
}

}  // namespace fedkernels::FEDKERNELS_ISA
