// y = x Wᵀ with int8 weights, one scale for each output, and int16 activations, one scale for each token.
//
// A product of 16-bit pairs summed into 32 bits is exact, and without VNNI as fast as one of 8-bit pairs, which
// saturates. Activations keep as many bits as no sum can leave 32 bits with. Sums of integers have no order, so an
// output has the same bits in any batch.
#include <vector>

#include "linear.hpp"
#include "scratch.hpp"

namespace tessera {
namespace {

typedef int16_t WideShorts __attribute__((vector_size(4 * WIDE)));
typedef int8_t HalfWideBytes __attribute__((vector_size(2 * WIDE)));
typedef int32_t Pair __attribute__((may_alias));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));

constexpr int GROUP = 4;     // inputs are padded with zeros to a multiple of it
constexpr int64_t GAP = 32;  // elements between rows of activations: rows 4 KiB apart would share sets of the cache
constexpr float NO_SCALE = 1e-30f;

TESSERA_INLINE WideShorts load_weights(const int8_t* from) {
  const HalfWideBytes bytes = load_as<HalfWideBytes>(from);
#if defined(__AVX512BW__)
  return (WideShorts)_mm512_cvtepi8_epi16((__m256i)bytes);
#elif defined(__AVX2__)
  return (WideShorts)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  return __builtin_convertvector(bytes, WideShorts);
#endif
}

// sum + the products of each even lane and the odd lane after it.
TESSERA_INLINE WideInts add_pairs(WideInts sum, WideShorts a, WideShorts b) {
#if defined(__AVX512VNNI__)
  return (WideInts)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (WideInts)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (WideInts)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (WideInts)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const WideInts x = (WideInts)a, y = (WideInts)b;
  return sum + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// low and high += the products of the pair of activations at `pair` and the weights.
TESSERA_INLINE void add_row(WideInts& low, WideInts& high, const int16_t* pair, WideShorts w0, WideShorts w1) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  // Sixteen registers are enough for six rows in this order; the compiler's own needs more, and stores the sums.
  // An array whose elements are operands themselves would stay in memory.
  WideInts x, product, first = low, second = high;
  asm("vpbroadcastd %4, %2\n\t"
      "vpmaddwd %5, %2, %3\n\t"
      "vpmaddwd %6, %2, %2\n\t"
      "vpaddd %3, %0, %0\n\t"
      "vpaddd %2, %1, %1"
      : "+x"(first), "+x"(second), "=&x"(x), "=&x"(product)
      : "m"(*reinterpret_cast<const Pair*>(pair)), "x"(w0), "x"(w1));
  low = first, high = second;
#else
  const WideShorts both = (WideShorts)(load_as<int32_t>(pair) - WideInts{});
  low = add_pairs(low, both, w0);
  high = add_pairs(high, both, w1);
#endif
}

// One tile; x rows are `stride` apart. Few rows have two sums each, or an addition would wait for the one before it.
// Inlined into what calls it, it would not have all registers.
template <int R>
__attribute__((noinline)) void int8_tile(float* y, int64_t outputs, int columns, const int16_t* x, int64_t stride,
                                         const float* x_scales, const int8_t* weights, const float* scales,
                                         int64_t inputs, Ahead<2 * COLUMNS> ahead) {
  constexpr int CHAINS = R <= 3 ? 2 : 1;
  WideInts low[CHAINS][R] = {}, high[CHAINS][R] = {};
  Rows<R, int16_t> rows(x, stride);
  for (int64_t k = 0; k < inputs; k += GROUP) {
#pragma GCC unroll 2
    for (int i = 0; i < GROUP / 2; ++i, weights += 2 * COLUMNS) {
      const WideShorts w0 = load_weights(weights), w1 = load_weights(weights + COLUMNS);
      ahead.ask();
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) add_row(low[i % CHAINS][r], high[i % CHAINS][r], rows[r] + 2 * i, w0, w1);
    }
    rows.advance(GROUP);
  }
  float padded[COLUMNS] = {};
  if (columns < COLUMNS) scales = std::copy_n(scales, columns, padded) - columns;
  const WideFloats low_scales = load_as<WideFloats>(scales), high_scales = load_as<WideFloats>(scales + WIDE);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    if (CHAINS == 2) low[0][r] += low[CHAINS - 1][r], high[0][r] += high[CHAINS - 1][r];
    store_columns(y + r * outputs, __builtin_convertvector(low[0][r], WideFloats) * low_scales * x_scales[r],
                  __builtin_convertvector(high[0][r], WideFloats) * high_scales * x_scales[r], columns);
  }
}

// The low halves of the lanes.
TESSERA_INLINE Shorts narrow(Ints x) {
#if defined(__AVX2__)
  const __m128i* halves = reinterpret_cast<const __m128i*>(&x);
  const __m128i low = _mm_set1_epi32(0xffff);
  return (Shorts)_mm_packus_epi32(_mm_and_si128(halves[0], low), _mm_and_si128(halves[1], low));
#else
  return __builtin_convertvector(x, Shorts);
#endif
}

// One token's int16, and zeros up to `stride`; returns its scale: NaN where an element is not finite.
float quantise(int16_t* to, const float* from, int64_t count, int64_t stride, float largest) {
  constexpr int32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;  // floats order as their bits do
  const int64_t whole = count / LANES * LANES;
  Ints tops = {};
  for (int64_t k = 0; k < whole; k += LANES) {
    const Ints size = bit_cast<Ints>(load(from + k)) & MAGNITUDE;
    tops = size > tops ? size : tops;
  }
  int32_t top = 0;
  for (int i = 0; i < LANES; ++i) top = std::max(top, tops[i]);
  for (int64_t k = whole; k < count; ++k) top = std::max(top, bit_cast<int32_t>(from[k]) & MAGNITUDE);
  if (top >= INFINITE) {
    std::fill(to, to + stride, 0);
    return NAN;
  }
  const float scale = std::max(bit_cast<float>(top), NO_SCALE) / largest, inverse = 1.f / scale;
  for (int64_t k = 0; k < whole; k += LANES) {
    // The sum's low half is the integer nearest to the product: 1.5 * 2^23 leaves it 22 bits and a sign.
    const Shorts low = narrow(bit_cast<Ints>(load(from + k) * inverse + 12582912.f));
    std::memcpy(to + k, &low, sizeof low);
  }
  for (int64_t k = whole; k < count; ++k) to[k] = static_cast<int16_t>(std::nearbyint(from[k] * inverse));
  std::fill(to + count, to + stride, 0);
  return scale;
}

}  // namespace
}  // namespace tessera

using namespace tessera;

extern "C" {

// weights [outputs, inputs] -> panels [outputs / COLUMNS, inputs / 2, COLUMNS, 2], outputs rounded up to whole panels
// and inputs to a multiple of 4, padded with zeros. `to` may be `weights`, if nothing is padded: a panel takes the place
// of the rows that it is made of.
void tessera_int8_pack(int8_t* to, const int8_t* weights, int64_t outputs, int64_t inputs, int32_t threads) {
  const int64_t padded = ceil_div(inputs, GROUP) * GROUP;
#pragma omp parallel num_threads(threads)
  {
    std::vector<int8_t> rows(COLUMNS * padded);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < outputs; panel += COLUMNS) {
      for (int64_t n = 0; n < COLUMNS && panel + n < outputs; ++n)
        std::copy_n(weights + (panel + n) * inputs, inputs, rows.begin() + n * padded);
      if (outputs - panel < COLUMNS) std::fill(rows.begin() + (outputs - panel) * padded, rows.end(), 0);
      int8_t* next = to + panel * padded;
      for (int64_t k = 0; k < padded; k += 2)
        for (int64_t n = 0; n < COLUMNS; ++n, next += 2) std::copy_n(rows.begin() + n * padded + k, 2, next);
    }
  }
}

// y [tokens, outputs] = x [tokens, inputs] times the packed weights times `scales` [outputs]. `largest` is the largest
// magnitude of an activation's integer: times the sum of the magnitudes of any output's weights it must fit 32 bits.
void tessera_int8_linear(float* y, const float* x, const int8_t* packed, const float* scales, float largest,
                         int64_t tokens, int64_t outputs, int64_t inputs, int32_t threads) {
  thread_local Scratch scratch;
  const int64_t padded = ceil_div(inputs, GROUP) * GROUP, stride = padded + GAP;
  float* x_scales = scratch.floats(tokens + ceil_div(tokens * stride, 2));
  int16_t* integers = reinterpret_cast<int16_t*>(x_scales + tokens);
  Product product(tokens, outputs, 1, stride * sizeof(int16_t));
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
      x_scales[t] = quantise(integers + t * stride, x + t * inputs, inputs, stride, largest);
    product.deal([&](const Tile& tile, int64_t) {
      const int64_t column = tile.panel * COLUMNS;
      const int columns = static_cast<int>(std::min<int64_t>(COLUMNS, outputs - column));
      const int8_t* weights = packed + column * padded;
      const Ahead<2 * COLUMNS> ahead(tile, weights, COLUMNS * padded, COLUMNS * padded);
      with_rows(tile.rows, [&](auto rows) {
        int8_tile<rows>(y + tile.token * outputs + column, outputs, columns, integers + tile.token * stride, stride,
                        x_scales + tile.token, weights, scales + column, padded, ahead);
      });
    });
  }
}

}  // extern "C"
