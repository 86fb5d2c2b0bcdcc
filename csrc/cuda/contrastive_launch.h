// The host's part of the contrastive passes on the tensor cores, for one precision: which tiles a width takes, the rows
// as the kernel reads them, and the launches.
#pragma once

#include "cuda/contrastive_tensor_cores.h"

namespace fedkernels::cuda {

namespace {

template <typename... T>
struct TileList {};

// In the order in which they are tried: the first serves that is wide enough and fits. The smaller ones of one width
// are for devices whose blocks have 163 KB or 99 KB of shared memory.
template <typename P>
using HalfTiles = TileList<Tiles<P, 64, 4, 2, 2, 64>, Tiles<P, 128, 4, 2, 2, 64>, Tiles<P, 256, 4, 2, 2, 64>,
                           Tiles<P, 256, 4, 2, 1, 32>, Tiles<P, 512, 2, 4, 2, 64>, Tiles<P, 512, 4, 2, 1, 32>,
                           Tiles<P, 512, 2, 2, 1, 16>, Tiles<P, 768, 2, 4, 1, 32>, Tiles<P, 1024, 2, 4, 1, 32>>;
using TF32Tiles = TileList<Tiles<TF32, 64, 4, 2, 2, 32>, Tiles<TF32, 128, 4, 2, 2, 32>, Tiles<TF32, 128, 4, 2, 1, 32>,
                           Tiles<TF32, 256, 4, 2, 2, 32>, Tiles<TF32, 256, 4, 2, 1, 32>, Tiles<TF32, 256, 2, 2, 1, 16>,
                           Tiles<TF32, 512, 4, 2, 1, 16>, Tiles<TF32, 512, 2, 2, 1, 16>>;

// use(tiles) with those that serve; false where none does.
template <typename... T, typename Use>
bool with_tiles(TileList<T...>, int64_t width, Use use) {
  const size_t limit = shared_limit();
  return ((T::WIDTH >= width && T::BYTES <= limit && (use(T()), true)) || ...);
}

// One block a row: the row as it is multiplied, and behind it zeros to the width of the tiles.
template <typename Precision, typename Entry = typename Precision::Entry>
__global__ void __launch_bounds__(128) pad_kernel(const Entry* rows, int width, Entry* padded, int padded_width) {
  const int64_t row = blockIdx.x;
  for (int column = threadIdx.x; column < padded_width; column += blockDim.x) {
    padded[row * padded_width + column] =
        column < width ? Precision::rounded(rows[row * width + column]) : static_cast<Entry>(0);
  }
}

// How one pass is laid out in memory: the parts' sums and gradients, then the padded rows where these are needed.
struct Layout {
  int parts;
  bool padded;
  int64_t at_padded, bytes;  // both in bytes, multiples of 16
};

template <typename T>
Layout layout_of(const ContrastivePass& pass) {
  using Entry = typename T::Entry;
  Layout layout = {};
  layout.parts = parts_of(up(pass.row_count, T::ROWS) / T::ROWS, up(pass.column_count, T::COLUMNS) / T::COLUMNS);
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool rounded = sizeof(Entry) == 2;  // halves are multiplied as they are
  layout.padded = !(rounded && pass.width == T::WIDTH && aligned(pass.rows.data) && aligned(pass.columns.data));
  const int64_t numbers = numbers_of_parts<float>(pass, layout.parts);
  layout.at_padded = layout.bytes = up(numbers * static_cast<int64_t>(sizeof(float)), 16);
  const int64_t rows = pass.row_count + (pass.rows.data == pass.columns.data ? 0 : pass.column_count);
  if (layout.padded) layout.bytes += rows * T::WIDTH * static_cast<int64_t>(sizeof(Entry));
  return layout;
}

template <typename T, PassKind KIND>
const char* launch_pass(const Arguments<typename T::Entry, float>& pass, Stream stream) {
  const unsigned row_blocks = static_cast<unsigned>((pass.row_count + T::ROWS - 1) / T::ROWS);
  const Shape shape = {dim3(row_blocks, static_cast<unsigned>(pass.parts)), dim3(T::THREADS), T::BYTES};
  return launch(shape, stream, contrastive_kernel<T, KIND>, pass);
}

template <typename T>
const char* launch_kind(const ContrastivePass& given, const Arguments<typename T::Entry, float>& pass, Stream stream) {
  if (!given.given && !given.gradient.data) return launch_pass<T, PassKind::sums>(pass, stream);
  if (!given.given) return launch_pass<T, PassKind::sums_and_gradient>(pass, stream);
  if (!given.row_share) return launch_pass<T, PassKind::given_columns>(pass, stream);
  return launch_pass<T, PassKind::given_both>(pass, stream);
}

template <typename T>
const char* run(const ContrastivePass& given, void* memory, Stream stream) {
  using Precision = typename T::Precision;
  using Entry = typename T::Entry;
  const Layout layout = layout_of<T>(given);
  Arguments<Entry, float> pass = arguments_of<Entry, float>(given, T::COLUMNS, layout.parts, memory);
  pass.weight_scale = given.given ? WEIGHT_SCALE : 1;
  Arguments<Entry, float> of_kernel = pass;
  if (layout.padded) {
    Entry* to = reinterpret_cast<Entry*>(static_cast<char*>(memory) + layout.at_padded);
    const auto pad = [&](const Entry* rows, int count) {
      return launch({dim3(static_cast<unsigned>(count)), dim3(128)}, stream, pad_kernel<Precision>, rows, pass.width,
                    to, T::WIDTH);
    };
    of_kernel.rows = of_kernel.columns = to;
    if (const char* error = pad(pass.rows, pass.row_count)) return error;
    if (pass.rows != pass.columns) {
      of_kernel.columns = to += static_cast<int64_t>(pass.row_count) * T::WIDTH;
      if (const char* error = pad(pass.columns, pass.column_count)) return error;
    }
  }
  if (const char* error = launch_kind<T>(given, of_kernel, stream)) return error;
  return join<Precision>(pass, given, stream);
}

template <typename List>
bool fits(List list, int64_t width) {
  return with_tiles(list, width, [](auto) {});
}

// -1 where no tiles serve.
template <typename List>
int64_t memory_of(List list, const ContrastivePass& pass) {
  int64_t bytes = -1;
  with_tiles(list, pass.width, [&](auto tiles) { bytes = layout_of<decltype(tiles)>(pass).bytes; });
  return bytes;
}

template <typename List>
const char* run(List list, const ContrastivePass& pass, void* memory, Stream stream) {
  const char* error = "the width is too large for this device";
  with_tiles(list, pass.width, [&](auto tiles) { error = run<decltype(tiles)>(pass, memory, stream); });
  return error;
}

}  // namespace

}  // namespace fedkernels::cuda
