#include "cpu/two_views.h"

#include "cpu/gemm.h"
#include "cpu/memory.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

using Register = Wide<float>;
using Floats = Register::Type;
constexpr int64_t WIDTH = Register::LANES;
static_assert(VIEW_PITCH % WIDTH == 0);

inline Floats clamp_to_one(Floats x) {
  const Floats zero = {}, one = Register::splat(1);
  x = x < zero ? zero : x;
  return x > one ? one : x;
}

inline Floats smaller(Floats x, Floats y) { return x < y ? x : y; }
inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

template <int C>
inline Floats luma(const Floats (&pixel)[C]) {
  if constexpr (C == 1) return pixel[0];
  else return pixel[0] * 0.2989f + pixel[1] * 0.587f + pixel[2] * 0.114f;
}

// Turns the hue of HSV, as the reference's formula does.
inline void turn_hue(Floats (&pixel)[3], float turns) {
  const Floats red = pixel[0], green = pixel[1], blue = pixel[2];
  const Floats value = larger(larger(red, green), blue);
  const Floats chroma = value - smaller(smaller(red, green), blue);
  const Floats smallest = Register::splat(1e-12f), zero = {}, six = Register::splat(6);
  const Floats scale = 1 / larger(chroma, smallest);
  const Floats of_green = (blue - red) * scale + 2, of_blue = (red - green) * scale + 4;
  Floats hue = value == green ? of_green : of_blue;
  hue = (value == red ? (green - blue) * scale : hue) + 6 * turns;  // -4 to 8
  hue = hue < zero ? hue + six : hue;
  hue = hue >= six ? hue - six : hue;
#pragma GCC unroll 3
  for (int c = 0; c < 3; ++c) {
    Floats k = hue + (5.0f - 2 * c);
    k = k >= six ? k - six : k;
    pixel[c] = value - chroma * clamp_to_one(smaller(k, 4 - k));
  }
}

// What is done with a pixel, one after the other.
constexpr int TO_GRAY = HUE + 1;

struct Step {
  int operation;  // a ViewOperation or TO_GRAY
  float factor, offset;
};

struct Steps {
  int count = 0;
  Step of[5];

  void add(int operation, float factor) { of[count++] = {operation, factor, 0}; }
};

template <int C>
inline void apply(const Steps& steps, Floats (&pixel)[C]) {
  for (int i = 0; i < steps.count; ++i) {
    const Step& step = steps.of[i];
    switch (step.operation) {
      case BRIGHTNESS:
        for (int c = 0; c < C; ++c) pixel[c] = clamp_to_one(pixel[c] * step.factor);
        break;
      case CONTRAST:
        // fault: + step.offset ->
        for (int c = 0; c < C; ++c) pixel[c] = clamp_to_one(pixel[c] * step.factor + step.offset);
        break;
      case SATURATION:
        if constexpr (C == 3) {
          const Floats gray = luma(pixel) * (1 - step.factor);
          for (int c = 0; c < C; ++c) pixel[c] = clamp_to_one(pixel[c] * step.factor + gray);
        }
        break;
      case HUE:
        if constexpr (C == 3) turn_hue(pixel, step.factor);
        break;
      default:
        const Floats gray = luma(pixel);
        for (int c = 0; c < C; ++c) pixel[c] = gray;
    }
  }
}

// Between which two pixels, and where between them, a pixel of the resized image lies. A crop is never larger than the
// image: neighbours lie at most one pixel apart.
struct Position {
  int64_t first;
  float weight;  // of the pixel after it
};

inline Position position(int64_t index, int64_t size, int64_t length) {
  double at = ((double)index + 0.5) * ((double)length / (double)size) - 0.5;
  at = at < 0 ? 0 : at;
  at = at > (double)(length - 1) ? (double)(length - 1) : at;
  const int64_t first = (int64_t)at;
  return {first, (float)(at - (double)first)};
}

// The positions of a row's pixels, a register's in one go: pixel x lies after entry base[x / WIDTH] + offset[x].
struct Columns {
  int32_t *base, *offset;
  float* weight;

  void fill(int64_t width, int64_t pitch, int64_t length, bool flip) const {
    for (int64_t x = 0; x < pitch; ++x) {
      const int64_t inside = x < width ? x : width - 1;
      // fault: width - 1 - inside -> width - inside
      const Position at = position(flip ? width - 1 - inside : inside, width, length);
      offset[x] = (int32_t)at.first;
      weight[x] = at.weight;
    }
    for (int64_t x = 0; x < pitch; x += WIDTH) {
      const int32_t least = offset[x] < offset[x + WIDTH - 1] ? offset[x] : offset[x + WIDTH - 1];
      base[x / WIDTH] = least;
      for (int64_t lane = 0; lane < WIDTH; ++lane) offset[x + lane] -= least;
    }
  }

  // Reads 2 WIDTH entries of the row from base[x / WIDTH] on.
  inline Floats interpolate(const float* row, int64_t x) const {
    const float* const from = row + base[x / WIDTH];
#if defined(__AVX512F__)
    const __m512i first = _mm512_loadu_si512(offset + x);
    const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + WIDTH);
    const Floats before = _mm512_permutex2var_ps(low, first, high);
    const Floats after = _mm512_permutex2var_ps(low, _mm512_add_epi32(first, _mm512_set1_epi32(1)), high);
#elif defined(__AVX2__)
    const __m256i first = _mm256_loadu_si256((const __m256i*)(offset + x));
    const __m256 low = _mm256_loadu_ps(from), high = _mm256_loadu_ps(from + WIDTH);
    const auto at = [&](__m256i index) {  // bit 3 tells which of the two registers
      return (Floats)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index),
                                      _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    };
    const Floats before = at(first), after = at(_mm256_add_epi32(first, _mm256_set1_epi32(1)));
#else
    Floats before, after;
    for (int64_t lane = 0; lane < WIDTH; ++lane) {
      before[lane] = from[offset[x + lane]];
      after[lane] = from[offset[x + lane] + 1];
    }
#endif
    return before + (after - before) * Register::load(weight + x);
  }
};

// A register of neighbouring pixels, 0 to 255.
inline Floats widened(const uint8_t* pixels) {
  typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));
#if defined(__AVX512F__)  // with a mask, as GCC 12 warns of the plain instruction's undefined operand
  const Integers integers = (Integers)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)pixels));
#elif defined(__AVX2__)
  const Integers integers = (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)pixels));
#else
  Integers integers;
  for (int64_t lane = 0; lane < WIDTH; ++lane) integers[lane] = pixels[lane];
#endif
  return __builtin_convertvector(integers, Floats);
}

inline int64_t reflected(int64_t index, int64_t size) {
  index = index < 0 ? -index : index;
  return index < size ? index : 2 * size - 2 - index;
}

// Half of a symmetric kernel, without the end that is 0 in float32.
struct BlurKernel {
  int64_t radius;
  float* weights;  // radius + 1, the middle first

  void fill(int64_t most, double sigma) {
    double total = 1;
    for (int64_t k = 1; k <= most; ++k) total += 2 * blur_weight(k, sigma);
    for (radius = 0; radius <= most; ++radius) {
      weights[radius] = (float)(blur_weight(radius, sigma) / total);
      if (weights[radius] < SMALLEST_BLUR_WEIGHT) break;
    }
    --radius;
  }
};

inline void store(float* to, float value) { *to = value; }
inline void store(uint16_t* to, float value) { *to = float_to_bfloat(value); }

template <int C>
struct View {
  const ViewSource& source;
  const ViewShape& shape;
  const ViewParameters& drawn;
  const ViewTarget& target;
  int64_t pitch;
  Columns columns;
  float* inside;       // [pitch]: 1 for a pixel, 0 behind the row's end
  // What is written is read a row later: read at once, and at other places than it was written, it would have to wait
  // until the processor has brought it to the cache.
  int64_t source_pitch;
  float* source_rows[2];  // [C, source_pitch] each: row r of the crop is source_rows[r % 2]
  float* resized[2];      // [C, pitch] each: the same, stretched
  int64_t ready = -1;     // the last row of `resized`
  float* line;            // [C, pitch]
  int64_t margin;         // on both sides of a padded row
  float* padded[2];       // [C, pitch + 2 margin] each: rows with their reflected ends
  float* planes;          // [C, height, pitch]
  BlurKernel kernel;

  View(const ViewSource& source, const ViewShape& shape, const ViewParameters& drawn, const ViewTarget& target,
       float* workspace)
      : source(source), shape(shape), drawn(drawn), target(target), pitch(view_pitch(shape.width)) {
    const int64_t radius = blur_radius(shape.height, shape.width);
    Memory memory{(char*)workspace};
    columns = {memory.take<int32_t>(pitch / WIDTH), memory.take<int32_t>(pitch), memory.take<float>(pitch)};
    inside = memory.take<float>(pitch);
    source_pitch = pitch + 2 * WIDTH;
    margin = (radius + WIDTH - 1) / WIDTH * WIDTH;
    for (float*& row : source_rows) row = memory.take<float>(C * source_pitch);
    for (float*& row : padded) row = memory.take<float>(C * (pitch + 2 * margin));
    for (float*& row : resized) row = memory.take<float>(C * pitch);
    line = memory.take<float>(C * pitch);
    kernel.weights = memory.take<float>(radius + 1);
    planes = memory.take<float>(C * shape.height * pitch);

    columns.fill(shape.width, pitch, drawn.width, drawn.flip);
    for (int64_t x = 0; x < pitch; ++x) inside[x] = x < shape.width;
    for (float* row : source_rows) {
      for (int64_t x = 0; x < C * source_pitch; ++x) row[x] = 0;
    }
    kernel.radius = 0;
    if (drawn.blur) kernel.fill(radius, drawn.sigma);
    read_source(0);
  }

  float* plane_row(int c, int64_t y) const { return planes + (c * shape.height + y) * pitch; }

  void read_source(int64_t row) const {
    for (int c = 0; c < C; ++c) {
      float* const to = source_rows[row % 2] + c * source_pitch;
      const uint8_t* const pixels = source.pixels + c * source.channel_stride +
                                    (drawn.top + row) * source.row_stride + drawn.left * source.column_stride;
      if (source.column_stride == 1 && drawn.width >= WIDTH) {
        for (int64_t x = 0; x < drawn.width; x += WIDTH) {
          const int64_t start = x + WIDTH <= drawn.width ? x : drawn.width - WIDTH;
          Register::store(to + start, widened(pixels + start) * (1 / 255.0f));
        }
      } else {
        for (int64_t x = 0; x < drawn.width; ++x) {
          to[x] = (float)pixels[x * source.column_stride] * (1 / 255.0f);
        }
      }
    }
  }

  void stretch(int64_t row) const {
    if (row + 1 < drawn.height) read_source(row + 1);
    for (int c = 0; c < C; ++c) {
      const float* const from = source_rows[row % 2] + c * source_pitch;
      float* const to = resized[row % 2] + c * pitch;
      for (int64_t x = 0; x < pitch; x += WIDTH) Register::store(to + x, columns.interpolate(from, x));
    }
  }

  // Row y of the resized crop after `steps` -> rows; adds the luma of its pixels to `sums`.
  void resize(int64_t y, const Steps& steps, float* const (&rows)[C], double* sums) {
    const Position at = position(y, shape.height, drawn.height);
    const int64_t last = at.first + 1 < drawn.height ? at.first + 1 : at.first;
    while (ready < last) stretch(++ready);
    const float *const above = resized[at.first % 2], *const below = resized[last % 2];
    Floats row_sum = {};
    for (int64_t x = 0; x < pitch; x += WIDTH) {
      Floats pixel[C];
      for (int c = 0; c < C; ++c) {
        const Floats first = Register::load(above + c * pitch + x);
        pixel[c] = first + (Register::load(below + c * pitch + x) - first) * at.weight;
      }
      apply(steps, pixel);
      row_sum += luma(pixel) * Register::load(inside + x);
      for (int c = 0; c < C; ++c) Register::store(rows[c] + x, pixel[c]);
    }
    for (int64_t lane = 0; lane < WIDTH; ++lane) sums[lane] += row_sum[lane];
  }

  void apply_to_row(const Steps& steps, float* const (&rows)[C]) const {
    for (int64_t x = 0; x < pitch; x += WIDTH) {
      Floats pixel[C];
      for (int c = 0; c < C; ++c) pixel[c] = Register::load(rows[c] + x);
      apply(steps, pixel);
      for (int c = 0; c < C; ++c) Register::store(rows[c] + x, pixel[c]);
    }
  }

  void pad_row(int64_t y, float* const (&rows)[C]) const {
    for (int c = 0; c < C; ++c) {
      float* const middle = padded[y % 2] + c * (pitch + 2 * margin) + margin;
      for (int64_t x = 0; x < pitch; x += WIDTH) Register::store(middle + x, Register::load(rows[c] + x));
      for (int64_t k = 1; k <= kernel.radius; ++k) {
        middle[-k] = rows[c][reflected(-k, shape.width)];
        middle[shape.width - 1 + k] = rows[c][reflected(shape.width - 1 + k, shape.width)];
      }
    }
  }

  // Padded row y -> row y of the planes
  void blur_row(int64_t y) const {
    for (int c = 0; c < C; ++c) {
      const float* const middle = padded[y % 2] + c * (pitch + 2 * margin) + margin;
      float* const to = plane_row(c, y);
      for (int64_t x = 0; x < pitch; x += WIDTH) {
        Floats sum = Register::load(middle + x) * kernel.weights[0];
        for (int64_t k = 1; k <= kernel.radius; ++k) {
          sum += (Register::load(middle + x - k) + Register::load(middle + x + k)) * kernel.weights[k];
        }
        Register::store(to + x, sum);
      }
    }
  }

  // COUNT registers of row y, from x on, out of the planes
  template <int COUNT>
  void blur_columns(int c, int64_t y, int64_t x, float* to) const {
    const float* const middle = plane_row(c, y) + x;
    Floats sums[COUNT];
    for (int i = 0; i < COUNT; ++i) sums[i] = Register::load(middle + i * WIDTH) * kernel.weights[0];
    for (int64_t k = 1; k <= kernel.radius; ++k) {
      const float* const above = plane_row(c, reflected(y - k, shape.height)) + x;
      const float* const below = plane_row(c, reflected(y + k, shape.height)) + x;
      for (int i = 0; i < COUNT; ++i) {
        sums[i] += (Register::load(above + i * WIDTH) + Register::load(below + i * WIDTH)) * kernel.weights[k];
      }
    }
    for (int i = 0; i < COUNT; ++i) Register::store(to + i * WIDTH, sums[i]);
  }

  void blur_columns(int64_t y, float* const (&rows)[C]) const {
    for (int c = 0; c < C; ++c) {
      int64_t x = 0;
      for (; x + 4 * WIDTH <= pitch; x += 4 * WIDTH) blur_columns<4>(c, y, x, rows[c] + x);
      for (; x < pitch; x += WIDTH) blur_columns<1>(c, y, x, rows[c] + x);
    }
  }

  template <class Entry>
  void write_entries(int64_t y, float* const (&rows)[C]) const {
    const int64_t width = shape.width;
    Entry* const entries = (Entry*)target.entries;
    if (target.channels_last) {
      const int64_t channels = shape.channels;
      Entry* const to = entries + y * width * channels;
      for (int64_t x = 0; x < width; ++x) {
        for (int c = 0; c < C; ++c) store(to + x * channels + c, rows[c][x] * 4 - 2);
      }
    } else {
      for (int c = 0; c < C; ++c) {
        Entry* const to = entries + (c * shape.height + y) * width;
        for (int64_t x = 0; x < width; ++x) store(to + x, rows[c][x] * 4 - 2);
      }
    }
  }

  // Solarises, normalises and writes row y.
  void write_row(int64_t y, float* const (&rows)[C]) const {
    if (drawn.solarize) {
      for (int c = 0; c < C; ++c) {
        for (int64_t x = 0; x < pitch; x += WIDTH) {
          const Floats value = Register::load(rows[c] + x);
          Register::store(rows[c] + x, value >= Register::splat(0.5f) ? 1 - value : value);
        }
      }
    }
    if (target.bfloat16) write_entries<uint16_t>(y, rows);
    else write_entries<float>(y, rows);
  }
};

template <int C>
void one_view(const ViewSource& source, const ViewShape& shape, const ViewOptions& options,
              const ViewParameters& drawn, const ViewTarget& target, float* workspace) {
  View<C> view(source, shape, drawn, target, workspace);
  // Contrast needs the mean of the whole image: what comes after it waits until all rows are resized.
  Steps early, late;
  bool contrast = false;
  for (int i = 0; i < 4 && drawn.jitter; ++i) {
    const int operation = drawn.order[i];
    if (options.strengths[operation] == 0 || (C == 1 && operation > CONTRAST)) continue;
    contrast |= operation == CONTRAST;
    (contrast ? late : early).add(operation, drawn.factors[operation]);
  }
  if (drawn.grayscale && C == 3) (contrast ? late : early).add(TO_GRAY, 0);

  const bool blurred = view.kernel.radius > 0;
  float* line[C];
  for (int c = 0; c < C; ++c) line[c] = view.line + c * view.pitch;
  const auto finish = [&](int64_t y, float* const (&rows)[C]) {
    if (!blurred) return view.write_row(y, rows);
    view.pad_row(y, rows);
    if (y > 0) view.blur_row(y - 1);
  };
  double sums[WIDTH] = {};
  for (int64_t y = 0; y < shape.height; ++y) {
    float* rows[C];
    for (int c = 0; c < C; ++c) rows[c] = contrast ? view.plane_row(c, y) : line[c];
    view.resize(y, early, rows, sums);
    if (!contrast) finish(y, rows);
  }
  if (contrast) {
    double total = 0;
    for (int64_t lane = 0; lane < WIDTH; ++lane) total += sums[lane];
    late.of[0].offset = (float)(total / (double)(shape.height * shape.width)) * (1 - late.of[0].factor);
    for (int64_t y = 0; y < shape.height; ++y) {
      float* rows[C];
      for (int c = 0; c < C; ++c) rows[c] = view.plane_row(c, y);
      view.apply_to_row(late, rows);
      finish(y, rows);
    }
  }
  if (!blurred) return;
  view.blur_row(shape.height - 1);
  for (int64_t y = 0; y < shape.height; ++y) {
    view.blur_columns(y, line);
    view.write_row(y, line);
  }
}

}  // namespace

void two_views(const ViewSource& source, const ViewShape& shape, const ViewOptions& options,
               const ViewParameters& drawn, const ViewTarget& target, float* workspace) {
  if (shape.channels == 3) return one_view<3>(source, shape, options, drawn, target, workspace);
  // Without jitter each channel is an image of its own.
  ViewParameters alone = drawn;
  // fault: && shape.channels == 1 ->
  alone.jitter = drawn.jitter && shape.channels == 1;
  const int64_t step = (target.channels_last ? 1 : shape.height * shape.width) * (target.bfloat16 ? 2 : 4);
  for (int64_t c = 0; c < shape.channels; ++c) {
    const ViewSource channel = {source.pixels + c * source.channel_stride, 0, source.row_stride, source.column_stride};
    const ViewTarget there = {(char*)target.entries + c * step, target.bfloat16, target.channels_last};
    one_view<1>(channel, shape, options, alone, there, workspace);
  }
}

}  // namespace fedkernels::FEDKERNELS_ISA
