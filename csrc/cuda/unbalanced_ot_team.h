// The team that solves a problem of unbalanced_ot.cu: where its vectors and entries lie, how its threads share them, and
// how it sums them.
#pragma once

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/unbalanced_ot.h"

namespace fedkernels::cuda {

namespace {

constexpr int GROUP = 8;  // rows that a crew sums together: a warp, or where a team has several blocks one of these
constexpr int LOADS = 4;  // entries that a thread loads at a time
constexpr int MOST_SUMS = 3;
constexpr int ALONE_LIMIT = 128;  // rows, and columns, of a problem that one block solves alone
constexpr int ALONE_THREADS = ALONE_LIMIT / GROUP * 32;
constexpr int TEAM_THREADS = 192, TEAM_WARPS = TEAM_THREADS / 32;
constexpr int TEAM_BLOCKS = 2;  // of a multiprocessor: 12 warps, with up to 168 registers a thread
constexpr int MOST_BLOCKS = 64;

// values[r] of all lanes reduced -> lane l has that of r = l / 4. An exchange halves what a lane still holds.
template <typename Operation>
__device__ __forceinline__ double reduce_rows(double (&values)[GROUP], Operation operation) {
#pragma unroll
  for (int half = GROUP / 2; half > 0; half /= 2) {
    const int offset = 4 * half;
    const bool upper = threadIdx.x & offset;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const double sent = upper ? values[k] : values[k + half], kept = upper ? values[k + half] : values[k];
      values[k] = operation(kept, __shfl_xor_sync(ALL_LANES, sent, offset));
    }
  }
  const double value = operation(values[0], __shfl_xor_sync(ALL_LANES, values[0], 2));
  return operation(value, __shfl_xor_sync(ALL_LANES, value, 1));
}

// The vectors of a problem over its rows and over its columns.
enum Vector { MASSES, DUALS, OF_PLAN, OF_POINT, OF_TRIAL, OF_BEST, ROOM, VECTORS };

// Where in a team's memory, counted in doubles, a block finds what it works on. Of vectors over the rows a block uses
// its own rows only; of those over the columns each has a copy, and the copies are equal.
struct Layout {
  int rows, columns, groups, blocks, crews;
  int64_t in_shared = 0;  // doubles of the beginning that are in shared memory: all vectors and some groups, or nothing

  __host__ __device__ int64_t by_row(int vector) const { return static_cast<int64_t>(vector) * rows; }
  __host__ __device__ int64_t by_column(int vector, int block) const {
    return by_row(VECTORS) + static_cast<int64_t>(vector * blocks + block) * columns;
  }
  __host__ __device__ int64_t partial(int crew) const { return by_column(VECTORS, crew); }
  __host__ __device__ int64_t reduced() const { return partial(crews); }    // [columns], of all blocks
  __host__ __device__ int64_t sums() const { return reduced() + columns; }  // [2, blocks, MOST_SUMS]
  __host__ __device__ int64_t point(int group) const {                      // [GROUP, columns]
    return sums() + 2 * blocks * MOST_SUMS + static_cast<int64_t>(group) * GROUP * columns;
  }
  __host__ __device__ int64_t plan(int group) const { return point(groups + group); }
  __host__ __device__ int64_t end() const { return plan(groups); }
};

// Shared memory beside the team's.
struct Scratch {
  double of_warps[MOST_SUMS][32], of_groups[TEAM_WARPS][GROUP];
};

struct Entry {
  double cost, plan, point, u, v;
  double *plan_at, *point_at;
};

// What an entry adds to its row's sum and to its column's.
struct Pair {
  double of_row, of_column;
};

// A crew shares out the columns of its groups of rows to its threads: a thread works on the same entries all the time.
// What is for all blocks is written between two barriers and read by `seen`.
template <bool ALONE>
struct Team {
  const Transport& t;
  const Layout& layout;
  const int64_t problem;
  double* const memory;               // in global memory
  unsigned long long* const counter;  // of barriers
  Scratch& scratch;

  const int rows = layout.rows, columns = layout.columns, threads = ALONE ? blockDim.x : TEAM_THREADS;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int blocks = ALONE ? 1 : layout.blocks, rank = ALONE ? 0 : blockIdx.x % layout.blocks;  // of the team
  // A crew, its threads and this thread's place.
  const int crews = ALONE ? threads / 32 : blocks, crew = ALONE ? warp : rank;
  const int crew_threads = ALONE ? 32 : TEAM_THREADS, of_crew = ALONE ? lane : thread;
  int turn = 0;

  // The vectors and sums of a block that is alone are in shared memory, and the compiler knows it.
  // Places are formed where they are used: kept during the whole solve they would take the registers of the entries.
  __device__ double* of(int64_t place) const {
    return ALONE ? dynamic_shared<double>() + place : keep_here(memory) + place;
  }
  __device__ double* entries_of(int64_t place) const {
    return place < layout.in_shared ? dynamic_shared<double>() + place : memory + (place - layout.in_shared);
  }
  __device__ double* by_row(int vector) const { return of(layout.by_row(keep_here(vector))); }
  __device__ double* by_column(int vector) const { return of(layout.by_column(keep_here(vector), rank)); }
  __device__ double* partial() const { return of(layout.partial(crew)); }

  __device__ void wait() const {
    if (ALONE) return __syncthreads();
    barrier_of_blocks(counter, static_cast<unsigned>(blocks));
  }
  __device__ static double seen(const double* of_all) { return ALONE ? *of_all : __ldcg(of_all); }

  // Calls body(i) for this thread's part of the block's rows.
  template <typename Body>
  __device__ void for_rows(const Body& body) const {
#pragma unroll 1
    for (int k = thread; k < (layout.groups - rank + blocks - 1) / blocks * GROUP; k += threads) {
      const int i = (rank + k / GROUP * blocks) * GROUP + k % GROUP;
      if (i < rows) body(i);
    }
  }
  template <typename Body>
  __device__ void for_columns(const Body& body) const {
#pragma unroll 1
    for (int j = thread; j < columns; j += threads) body(j);
  }
  // Each column is one thread's of the whole team.
  template <typename Body>
  __device__ void for_shared_columns(const Body& body) const {
#pragma unroll 1
    for (int j = rank * threads + thread; j < columns; j += blocks * threads) body(j);
  }

  // Where a group's rows begin in the cost and the result, in plan, point and u, and v.
  struct Rows {
    int count;
    int64_t first;
    double *plan, *point;
    const double *u, *v;
  };
  __device__ Rows rows_of(int group, int duals) const {
    const int first = group * GROUP, left = rows - first;
    return {left < GROUP ? left : GROUP,     (problem * rows + first) * columns, entries_of(layout.plan(group)),
            entries_of(layout.point(group)), by_row(duals) + first,              by_column(duals)};
  }

  // Column j of LOADS rows of the group from `first` on. All loads are on their way before the first is used, and no
  // branch is between them: past the last row there is that row once more. What a pass does not use is not loaded.
  __device__ __forceinline__ void load(Entry (&entries)[LOADS], const Rows& at, int first, int j) const {
    int row[LOADS];
#pragma unroll
    for (int r = 0; r < LOADS; ++r) row[r] = first + r < at.count ? first + r : at.count - 1;
    const auto load_cost = [&](const auto* cost) {
#pragma unroll
      for (int r = 0; r < LOADS; ++r) entries[r].cost = __ldg(cost + at.first + (row[r] * columns + j));
    };
    if (t.cost.dtype == DType::f64) {
      load_cost(static_cast<const double*>(t.cost.data));
    } else {
      load_cost(static_cast<const float*>(t.cost.data));
    }
    const double of_column = at.v[j];
#pragma unroll
    for (int r = 0; r < LOADS; ++r) {
      entries[r].plan_at = at.plan + (row[r] * columns + j);
      entries[r].point_at = at.point + (row[r] * columns + j);
      entries[r].plan = *entries[r].plan_at;
      entries[r].point = *entries[r].point_at;
      entries[r].u = at.u[row[r]];
      entries[r].v = of_column;
    }
  }

  // Calls body(index, entry) for this thread's entries; it may store to them.
  template <typename Body>
  __device__ void for_entries(const Body& body) const {
#pragma unroll 1
    for (int group = crew; group < layout.groups; group += crews) {
      const Rows at = rows_of(group, DUALS);
#pragma unroll 1
      for (int j = of_crew; j < columns; j += crew_threads) {
#pragma unroll 1
        for (int first = 0; first < at.count; first += LOADS) {
          Entry entries[LOADS];
          load(entries, at, first, j);
#pragma unroll
          for (int r = 0; r < LOADS; ++r) {
            if (first + r < at.count) body(at.first + ((first + r) * columns + j), entries[r]);
          }
        }
      }
    }
  }

  // of_entry(entry) -> a Pair, with the duals `from`. Reduces the first over each row, into by_row(to), and the second
  // over each column of this crew's rows, into partial().
  template <typename Operation, typename OfEntry>
  __device__ void reduce_entries(double neutral, Operation operation, int from, int to, const OfEntry& of_entry) {
#pragma unroll 1
    for (int group = crew; group < layout.groups; group += crews) {
      const Rows at = rows_of(group, from);
      double of_rows[GROUP];
#pragma unroll
      for (int r = 0; r < GROUP; ++r) of_rows[r] = neutral;
#pragma unroll 1
      for (int j = of_crew; j < columns; j += crew_threads) {
        double of_column = group == crew ? neutral : partial()[j];
        Entry entries[LOADS];
#pragma unroll
        for (int r = 0; r < GROUP; ++r) {
          if (r % LOADS == 0) load(entries, at, r, j);
          if (r >= at.count) continue;
          const Pair pair = of_entry(entries[r % LOADS]);
          of_rows[r] = operation(of_rows[r], pair.of_row);
          of_column = operation(of_column, pair.of_column);
        }
        partial()[j] = of_column;
      }
      __syncwarp();  // also lanes that had no columns
      write_rows(reduce_rows(of_rows, operation), operation, group, at, by_row(to));
    }
    __syncthreads();
  }

  // `value`: a warp's of row lane / 4 of the group.
  template <typename Operation>
  __device__ void write_rows(double value, Operation operation, int group, const Rows& at, double* to) {
    if (ALONE) {
      if (lane % 4 == 0 && lane / 4 < at.count) to[group * GROUP + lane / 4] = value;
      return;
    }
    __syncthreads();  // the group before has been read
    if (lane % 4 == 0) scratch.of_groups[warp][lane / 4] = value;
    __syncthreads();
    if (thread >= at.count) return;
    double all = scratch.of_groups[0][thread];
#pragma unroll 1
    for (int w = 1; w < TEAM_WARPS; ++w) all = operation(all, scratch.of_groups[w][thread]);
    to[group * GROUP + thread] = all;
  }

  // Column j of `partial` over all crews, whose blocks have waited for each other.
  template <typename Operation>
  __device__ double over_crews(int j, Operation operation) const {
    const double* first = of(layout.partial(0)) + j;
    double value = seen(first);
#pragma unroll 4
    for (int crew = 1; crew < crews; ++crew) value = operation(value, seen(first + crew * columns));
    return value;
  }

  // Every thread gets the team's sums: each warp adds up what the blocks have written, a block a lane.
  template <int COUNT>
  __device__ void sum(double (&values)[COUNT]) {
    sum_over_block(values);
    if (ALONE) return;
    double* const all = of(layout.sums()) + turn * blocks * MOST_SUMS;
    turn ^= 1;  // those of the last time may still be read
    if (thread == 0) {
      for (int k = 0; k < COUNT; ++k) all[rank * MOST_SUMS + k] = values[k];
    }
    wait();
    for (int k = 0; k < COUNT; ++k) {
      double of_lane = 0;
#pragma unroll 1
      for (int block = lane; block < blocks; block += 32) of_lane += seen(all + block * MOST_SUMS + k);
      values[k] = warp_reduce(of_lane, Sum());
    }
  }
  template <int COUNT>
  __device__ void sum_over_block(double (&values)[COUNT]) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) values[k] = warp_reduce(values[k], Sum());
    __syncthreads();  // earlier sums have been read
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k) scratch.of_warps[k][warp] = values[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      values[k] = 0;
      for (int w = 0; w < threads / 32; ++w) values[k] += scratch.of_warps[k][w];
    }
  }
};

}  // namespace

}  // namespace fedkernels::cuda
