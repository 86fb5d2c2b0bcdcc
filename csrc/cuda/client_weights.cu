// The algorithm is that of csrc/cpu/client_weights.cpp, which explains it: a linear complementarity problem by
// coordinate descent and block principal pivoting, in float64. A problem is one block's and a client one thread's. The
// Cholesky factor lies in shared memory, packed by columns, so that neighbours read from different banks; the matrix
// lies there too where both fit, else in the second-level cache.
//
// The CPU's kernel leaves some problems to the reference. To find these the host would have to read the weights, so they
// are solved here: a client that did not move takes all the weight, and where the optimum is 0 or not unique, a ridge on
// A makes it unique, so that equal clients share.
#include "cuda/client_weights.h"

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

// As in csrc/cpu/client_weights.cpp.
constexpr int SWEEPS = 30;
constexpr double SINGULAR = 1e-11;
constexpr double TIE = 1e-9;
constexpr double EPSILON = 2.220446049250313e-16;

// Added to the unit diagonal of A. The shares of two equal clients differ by EPSILON / ridge, and the solution on A +
// ridge I is off by ridge, which sharpen() squares. A matrix that rounding has made indefinite needs a larger one.
constexpr double FIRST_RIDGE = 1e-8, LARGEST_RIDGE = 1e5;

constexpr int LIMIT = static_cast<int>(WEIGHTS_LIMIT), OF_LANE = LIMIT / 32;
constexpr int VECTORS = 5;

__device__ inline double infinite() { return __longlong_as_double(0x7ff0000000000000); }

struct Problem {
  const int clients, i;  // i: this thread's client; those beyond the last take part in the barriers only
  const bool real;
  double *matrix, *factor;                                // [clients, clients], and a triangle
  double *right, *values, *solution, *inverse, *of_warps;  // shared memory
  int *positive, *chosen;
  double x = 0, w = 0;  // this client's
  double ridge = 0;

  __device__ Problem(int clients, double* matrix, double* vectors, double* factor)
      : clients(clients),
        i(threadIdx.x),
        real(i < clients),
        matrix(matrix),
        factor(factor),
        right(vectors),
        values(vectors + LIMIT),
        solution(vectors + 2 * LIMIT),
        inverse(vectors + 3 * LIMIT),
        of_warps(vectors + 4 * LIMIT),
        positive(reinterpret_cast<int*>(vectors + 4 * LIMIT + 32)),
        chosen(positive + LIMIT) {}

  __device__ double sum(double value) { return block_reduce(real ? value : 0, of_warps, Sum()); }
  __device__ double least(double value) { return block_reduce(real ? value : infinite(), of_warps, Least()); }
  __device__ double greatest(double value) { return block_reduce(real ? value : -infinite(), of_warps, Greatest()); }

  __device__ double& entry(int row, int column) { return matrix[row * clients + column]; }
  __device__ double& triangle(int row, int column) {
    return factor[column * clients - column * (column - 1) / 2 + row - column];
  }

  // The checks of fedkernels/client_weights.py. The symmetric part of G goes to `matrix`.
  __device__ bool read_gram(const Array& gram, int64_t start) {
    double largest = 0;
    bool bad = false;
    if (real) {
      for (int row = 0; row < clients; ++row) {
        const double here = fabs(read_one(gram, start + row * clients + i));
        bad |= !(here < infinite());
        largest = here > largest ? here : largest;
      }
    }
    if (__syncthreads_or(bad)) return false;
    const double slack = 1e-2 * greatest(largest);
    if (real) {
      const double diagonal = read_one(gram, start + i * clients + i);
      bad |= diagonal < -slack;
      values[i] = diagonal > 0 ? sqrt(diagonal) : 0;
    }
    __syncthreads();
    if (real) {
      for (int row = 0; row < clients; ++row) {
        const double one = read_one(gram, start + row * clients + i), other = read_one(gram, start + i * clients + row);
        bad |= !(fabs(one - other) <= slack) || !(fabs(one) <= values[row] * values[i] + slack);
        entry(row, i) = one / 2 + other / 2;
      }
    }
    return !__syncthreads_or(bad);
  }

  // matrix <- SGS with S = diag(G)^(-1/2), right <- S1 up to a factor. All clients have moved.
  __device__ void normalise() {
    const double diagonal = real ? entry(i, i) : 1;
    const double scale = 1 / sqrt(diagonal), shortest = least(scale);
    values[i] = scale;
    right[i] = scale / shortest;
    __syncthreads();
    if (real) {
      for (int row = 0; row < clients; ++row) entry(row, i) = row == i ? 1 : entry(row, i) * scale * values[row];
    }
    __syncthreads();
  }

  // Cyclic coordinate descent on x'Ax/2 - c'x by the first warp, four clients a lane; `positive` is where it ends above
  // 0.
  __device__ void descend() {
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      double at[OF_LANE] = {}, slope[OF_LANE];
      int above[OF_LANE] = {};
#pragma unroll
      for (int m = 0; m < OF_LANE; ++m) slope[m] = m * 32 + lane < clients ? -right[m * 32 + lane] : 0;
      int quiet = 0;
      for (int sweep = 0; sweep < SWEEPS && quiet < 3; ++sweep) {
        bool changed = false;
#pragma unroll
        for (int m = 0; m < OF_LANE; ++m) {
          for (int from = 0; from < 32 && m * 32 + from < clients; ++from) {
            const double own = slope[m] > at[m] ? -at[m] : -slope[m];
            const double move = __shfl_sync(ALL_LANES, own, from);
            const double* const row = &entry(m * 32 + from, 0);
#pragma unroll
            for (int n = 0; n < OF_LANE; ++n) {
              if (n * 32 + lane < clients) slope[n] += move * row[n * 32 + lane];
            }
            if (lane == from) {
              at[m] += move;
              changed |= above[m] != (at[m] > 0);
              above[m] = at[m] > 0;
            }
          }
        }
        quiet = __any_sync(ALL_LANES, changed) ? 0 : quiet + 1;
      }
#pragma unroll
      for (int m = 0; m < OF_LANE; ++m) {
        if (m * 32 + lane < clients) positive[m * 32 + lane] = above[m];
      }
    }
    __syncthreads();
  }

  // The lower Cholesky factor of A on the `count` chosen clients, with its diagonal's inverses; false where it is
  // singular.
  __device__ bool factorise(int count) {
    const int client = i < count ? chosen[i] : 0;
    for (int j = 0; j < count; ++j) {
      double value = 0;
      if (i >= j && i < count) {
        value = entry(chosen[j], client);
        for (int k = 0; k < j; ++k) value -= triangle(i, k) * triangle(j, k);
        triangle(i, j) = value;
      }
      __syncthreads();
      const double pivot = triangle(j, j);  // every thread has the same
      if (!(pivot > SINGULAR)) return false;
      const double over = 1 / sqrt(pivot);
      if (i > j && i < count) triangle(i, j) = value * over;
      if (i == j) inverse[j] = over;
      __syncthreads();
    }
    return true;
  }

  // -> entry i of A^-1 values on the chosen clients, whose entry i is this thread's `value`.
  __device__ double substitute(int count, double value) {
    for (int j = 0; j < count; ++j) {
      if (i == j) solution[j] = value *= inverse[j];
      __syncthreads();
      if (i > j && i < count) value -= triangle(i, j) * solution[j];
    }
    for (int j = count - 1; j >= 0; --j) {
      if (i == j) solution[j] = value *= inverse[j];
      __syncthreads();
      if (i < j) value -= triangle(j, i) * solution[j];
    }
    return value;
  }

  // w <- Ax - c.
  __device__ void complement() {
    __syncthreads();  // `values` has been read
    values[i] = x;
    __syncthreads();
    if (!real) return;
    w = -right[i];
    for (int row = 0; row < clients; ++row) w += values[row] * entry(row, i);
  }

  // x <- x - A^-1 (Ax - c) on the `count` chosen clients, by the factor that there is.
  __device__ void correct(int count, bool mine) {
    complement();
    __syncthreads();
    values[i] = -w;
    __syncthreads();
    const double part = substitute(count, i < count ? values[chosen[i]] : 0);
    __syncthreads();
    if (i < count) values[chosen[i]] = part;
    __syncthreads();
    if (mine) x += values[i];
  }

  // Proximal steps from the solution on A + ridge I towards one on A: corrections by the factor of the former. Where
  // rounding has made A indefinite they may lead away from it, so each has to be better than what there was.
  __device__ void sharpen(int count, bool mine) {
    set_ridge(0);
    double weight, best = residual(&weight);
    for (int step = 0; step < 2; ++step) {
      const double before = x;
      correct(count, mine);
      const double now = residual(&weight);
      if (!(now < best)) {
        x = before;
        return;
      }
      best = now;
    }
  }

  // -> p'Gp - min_k (Gp)_k in units of the trace, of the weights p that belong to x without what is below 0. It is 0 at
  // the optimum. (Gp)_i = (Ax)_i / (s_i total) and so on, s being `right` up to a factor.
  __device__ double residual(double* weight) {
    x = x > 0 ? x : 0;
    complement();
    const double mine = real ? right[i] : 1, total = sum(x * mine), slope = (w + mine) / mine / total;
    *weight = x * mine / total;
    return sum(*weight * slope) - least(slope);
  }

  __device__ void set_ridge(double value) {
    ridge = value;
    __syncthreads();  // the diagonal has been read
    if (real) entry(i, i) = 1 + ridge;
    __syncthreads();
  }

  // Lists the positive clients in `chosen`, and counts them. A barrier has to follow.
  __device__ int choose(bool mine) {
    int before = 0, count = 0;
    for (int k = 0; k < clients; ++k) {
      before += k < i && positive[k];
      count += positive[k];
    }
    __syncthreads();  // the list of the round before has been read
    if (mine) chosen[before] = i;
    return count;
  }

  // Where pivoting runs out of rounds: Lawson and Hanson's active set method (1974), one client a round, from none.
  __device__ bool one_by_one() {
    double kept = 0;  // this client's part of a feasible x
    __syncthreads();
    if (real) positive[i] = 0;
    __syncthreads();
    for (int round = 0; round < 10 * clients; ++round) {
      const bool mine = real && positive[i];
      const int count = choose(mine);
      x = 0;
      __syncthreads();
      if (!factorise(count)) return false;
      correct(count, mine);
      const double room = !mine || x > 0 ? infinite() : kept > 0 ? kept / (kept - x) : 0, reach = least(room);
      if (reach < infinite()) {  // as far as x stays feasible; who becomes 0 leaves
        const bool leaves = room == reach;
        kept = leaves || !mine ? 0 : kept + reach * (x - kept);
        if (leaves) positive[i] = 0;
        __syncthreads();
        continue;
      }
      kept = x;
      complement();
      const double noise = clients * EPSILON * greatest(x);
      const double slope = mine || !real || w >= -1e-12 * right[i] - noise ? infinite() : w / right[i];
      const double lowest = least(slope);
      if (!(lowest < infinite())) {
        sharpen(count, mine);
        return true;
      }
      const double enters = greatest(slope == lowest ? i : -1);
      if (i == enters) positive[i] = 1;
      __syncthreads();
    }
    return false;
  }

  __device__ bool pivot() {
    int fewest = clients + 1, chances = 3;
    for (int round = 0; round < 3 * clients + 50; ++round) {
      const bool mine = real && positive[i];
      const int count = choose(mine);
      x = 0;
      __syncthreads();
      if (!factorise(count)) return false;
      correct(count, mine);  // from x = 0
      complement();

      const double largest = greatest(x > 0 ? x : 0);
      // With a ridge x may be as large as 1 / ridge, and then the products of Ax are rounded to more than 1e-12.
      const double noise = ridge > 0 ? clients * EPSILON * largest : 0;
      const bool wrong = real && (mine ? x < -1e-14 * largest : w < -1e-12 * right[i] - noise);
      const int count_of_wrong = __syncthreads_count(wrong);
      if (count_of_wrong == 0) {
        if (ridge > 0) sharpen(count, mine);
        return true;
      }
      const double highest = greatest(wrong ? i : -1);
      if (count_of_wrong < fewest) {
        fewest = count_of_wrong;
        chances = 3;
      } else {
        --chances;
      }
      // All that are wrong change sides; where that did not help, one does, which ends in time (Murty 1974).
      if (wrong && (chances >= 0 || i == highest)) positive[i] = !positive[i];
      __syncthreads();
    }
    return ridge > 0 && one_by_one();
  }

  // -> this client's weight. Without a ridge: false where the optimum is not unique, or not reached to the tolerance.
  __device__ bool finish(double tol, bool has_ridge, double* weight) {
    if (__syncthreads_or(!has_ridge && real && !positive[i] && w <= TIE * right[i])) return false;
    const double reached = residual(weight);
    if (reached != reached) return false;  // no client has a weight
    if (has_ridge) return true;
    const double mine = real ? right[i] : 1, length = 1 / (mine * mine);
    double of_column = 0;
    if (real) {
      for (int row = 0; row < clients; ++row) of_column += entry(row, i) / right[row];
    }
    const double trace = sum(length), shortest = least(length);
    const double mean = sum(of_column / mine) / (static_cast<double>(clients) * clients);
    const double accept = (tol < 1e-10 ? tol : 1e-10) * (mean < shortest ? mean : shortest);
    return reached <= (accept > EPSILON * trace ? accept : EPSILON * trace);
  }

  __device__ double solve(const Array& gram, int64_t start, double tol) {
    const double nan = __longlong_as_double(0x7ff8000000000000);
    if (!read_gram(gram, start)) return nan;
    const double trace = sum(real ? entry(i, i) : 0);
    if (clients == 1 || trace <= 0) return 1.0 / clients;
    const bool still = real && !(entry(i, i) > 0);
    if (const int count = __syncthreads_count(still)) return still ? 1.0 / count : 0;
    normalise();
    double weight = 0;
    for (double next = 0; next < LARGEST_RIDGE; next = next > 0 ? 100 * next : FIRST_RIDGE) {
      set_ridge(next);
      descend();
      if (pivot() && finish(tol, next > 0, &weight)) return weight;
    }
    return nan;
  }
};

constexpr int OF_VECTORS = (VECTORS - 1) * LIMIT + 32 + LIMIT;  // the last: two of integers

__global__ void __launch_bounds__(LIMIT, 1)
    client_weights_kernel(Array gram, int clients, double tol, double* matrices, Array weights) {
  double* const vectors = dynamic_shared<double>();
  double* const factor = vectors + OF_VECTORS;
  const int64_t problem = blockIdx.x, entries = static_cast<int64_t>(clients) * clients;
  double* const matrix = matrices ? matrices + problem * entries : factor + clients * (clients + 1) / 2;
  Problem solver(clients, matrix, vectors, factor);
  const double weight = solver.solve(gram, problem * entries, tol);
  if (solver.real) write_one(weights, problem * clients + solver.i, weight);
}

struct Room {
  bool matrix;    // is it in shared memory?
  size_t shared;  // bytes
};

Room room_of(int64_t clients) {
  const size_t least = sizeof(double) * (OF_VECTORS + clients * (clients + 1) / 2);
  const size_t all = least + sizeof(double) * clients * clients;
  return all <= shared_limit() ? Room{true, all} : Room{false, least};
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_client_weights_words(int64_t problems, int64_t clients) {
  using namespace fedkernels::cuda;
  return clients > WEIGHTS_LIMIT || room_of(clients).matrix ? 0 : problems * clients * clients;
}

extern "C" const char* cuda_client_weights(const fedkernels::Array* gram, int64_t problems, int64_t clients, double tol,
                                           double* words, const fedkernels::Array* weights,
                                           fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (problems == 0) return nullptr;
  if (clients > WEIGHTS_LIMIT) return "too many clients for one block";
  const Room room = room_of(clients);
  const Shape shape = {dim3(static_cast<unsigned>(problems)), dim3(static_cast<unsigned>((clients + 31) / 32 * 32)),
                       room.shared};
  return launch(shape, stream, client_weights_kernel, *gram, static_cast<int>(clients), tol,
                room.matrix ? nullptr : words, *weights);
}
