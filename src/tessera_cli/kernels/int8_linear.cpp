// y = x Wᵀ with int8 weights, one scale for each output, and int16 activations, one scale for each token.
//
// A product of 16-bit pairs summed into 32 bits is exact and as fast here as one of 8-bit pairs, which saturates, so
// activations keep 11 to 15 bits and the result is that of int8 weights alone, to about four digits.
#include <algorithm>

#include "scratch.hpp"
#include "vectors.hpp"

namespace tessera {
namespace {

typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int16_t HalfShorts __attribute__((vector_size(16)));
typedef int8_t Bytes16 __attribute__((vector_size(16)));

constexpr int COLUMNS = 16;     // outputs of a panel
constexpr int ROWS = 6;         // tokens of a register tile: 2 * 6 accumulators
constexpr int ROW_BLOCK = 96;   // tokens whose activations stay in the second-level cache
constexpr float NO_SCALE = 1e-30f;

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

TESSERA_INLINE Shorts load_weights(const int8_t* from) {
  Bytes16 bytes;
  std::memcpy(&bytes, from, sizeof bytes);
#ifdef __AVX2__
  return (Shorts)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  return __builtin_convertvector(bytes, Shorts);
#endif
}

// Sums of the products of each even lane and the odd lane after it.
TESSERA_INLINE Ints multiply_pairs(Shorts a, Shorts b) {
#ifdef __AVX2__
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const Ints x = (Ints)a, y = (Ints)b;
  return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// One tile: R tokens by one panel. `x` rows are `stride` apart; `y` rows `y_stride`.
template <int R>
void tile(float* y, int64_t y_stride, const int16_t* x, int64_t stride, const float* x_scales, const int8_t* panel,
          const float* scales, int columns) {
  Ints low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = Ints{};
  for (int64_t k = 0; k < stride; k += 2, panel += 2 * COLUMNS) {
    const Shorts w0 = load_weights(panel), w1 = load_weights(panel + COLUMNS);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride + k, sizeof pair);
      const Shorts activation = (Shorts)(Ints{} + pair);
      low[r] += multiply_pairs(activation, w0);
      high[r] += multiply_pairs(activation, w1);
    }
  }
  float padded[COLUMNS] = {}, row[COLUMNS];
  std::copy_n(scales, columns, padded);
  for (int r = 0; r < R; ++r) {
    store(row, __builtin_convertvector(low[r], Floats) * load(padded) * x_scales[r]);
    store(row + LANES, __builtin_convertvector(high[r], Floats) * load(padded + LANES) * x_scales[r]);
    std::copy_n(row, columns, y + r * y_stride);
  }
}

// int16 of one token, `stride` of them, padded with zeros; returns its scale. A row that is not finite becomes NaN.
float quantise(int16_t* to, const float* from, int64_t count, int64_t stride, float largest) {
  Floats wide = {};
  int64_t whole = count / LANES * LANES, k = 0;
  bool finite = true;
  for (; k < whole; k += LANES) {
    const Floats x = load(from + k);
    wide = larger(x < 0.f ? -x : x, wide);
  }
  float top = std::max(largest_lane(wide), NO_SCALE), total = 0;
  for (; k < count; ++k) top = std::max(top, std::fabs(from[k]));
  for (k = 0; k < count; ++k) total += from[k] * 0.f;  // NaN as soon as one is infinite or NaN
  finite = total == 0.f;
  const float inverse = finite ? largest / top : 0.f;
  for (k = 0; k < whole; k += LANES) {
    const Floats x = finite ? load(from + k) * inverse : Floats{};
    const HalfShorts rounded = __builtin_convertvector((x + 12582912.f) - 12582912.f, HalfShorts);
    std::memcpy(to + k, &rounded, sizeof rounded);
  }
  for (; k < count; ++k) to[k] = finite ? static_cast<int16_t>(std::nearbyint(from[k] * inverse)) : 0;
  std::fill(to + count, to + stride, 0);
  return finite ? top / largest : NAN;
}

template <class... Rest> void tiles(int rows, Rest... rest) {
  switch (rows) {
    case 1: return tile<1>(rest...);
    case 2: return tile<2>(rest...);
    case 3: return tile<3>(rest...);
    case 4: return tile<4>(rest...);
    case 5: return tile<5>(rest...);
    default: return tile<ROWS>(rest...);
  }
}

}  // namespace
}  // namespace tessera

using namespace tessera;

extern "C" {

// weights [outputs, inputs] -> panels [outputs / 16, inputs / 2, 16, 2], both rounded up and padded with zeros.
void tessera_int8_pack(int8_t* to, const int8_t* weights, int64_t outputs, int64_t inputs) {
  for (int64_t panel = 0; panel < outputs; panel += COLUMNS)
    for (int64_t k = 0; k < inputs; k += 2)
      for (int64_t n = panel; n < panel + COLUMNS; ++n)
        for (int64_t i = k; i < k + 2; ++i) *to++ = n < outputs && i < inputs ? weights[n * inputs + i] : 0;
}

// y [tokens, outputs] = x [tokens, inputs] times the packed weights times `scales` [outputs].
void tessera_int8_linear(float* y, const float* x, const int8_t* packed, const float* scales, int64_t tokens,
                         int64_t outputs, int64_t inputs, int32_t threads) {
  thread_local Scratch scratch;
  const int64_t stride = round_up(inputs, 2), panels = round_up(outputs, COLUMNS) / COLUMNS;
  float* x_scales = scratch.floats(tokens + (tokens * stride + 1) / 2);
  int16_t* rows = reinterpret_cast<int16_t*>(x_scales + tokens);
  // No sum of `inputs` products of a weight and an activation leaves 32 bits.
  const int64_t largest = std::min<int64_t>(32767, 2147483647 / (127 * std::max<int64_t>(inputs, 1)));
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
      x_scales[t] = quantise(rows + t * stride, x + t * inputs, inputs, stride, static_cast<float>(largest));
    for (int64_t block = 0; block < tokens; block += ROW_BLOCK) {
      const int64_t end = std::min<int64_t>(tokens, block + ROW_BLOCK);
#pragma omp for schedule(static) nowait
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t column = panel * COLUMNS;
        const int columns = static_cast<int>(std::min<int64_t>(COLUMNS, outputs - column));
        for (int64_t t = block; t < end; t += ROWS)
          tiles(static_cast<int>(std::min<int64_t>(ROWS, end - t)), y + t * outputs + column, outputs,
                rows + t * stride, stride, x_scales + t, packed + column * stride, scales + column, columns);
      }
    }
  }
}

}  // extern "C"
