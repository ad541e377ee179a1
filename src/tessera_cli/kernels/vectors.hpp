// Vectors of floats, and the storage types that are read into them and written from them.
//
// GCC's vector types rather than intrinsics: one source becomes SSE2, AVX2, AVX-512 or NEON, as -march says.
// What has no vector form in the language (half precision, 16-bit pair products) is in one place each.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#define TESSERA_INLINE inline __attribute__((always_inline))

namespace tessera {

constexpr int LANES = 8;  // widths are multiples of it
#ifdef __AVX512F__
constexpr int MOST_LANES = 16;     // of the widest vector there is
constexpr __mmask16 ALL = 0xffff;  // masked loads, as GCC 12 warns of the unmasked ones in its own header
#else
constexpr int MOST_LANES = LANES;
#endif

template <int N> struct Vector {
  typedef float Floats __attribute__((vector_size(4 * N)));
  typedef int32_t Ints __attribute__((vector_size(4 * N)));
  typedef uint32_t Words __attribute__((vector_size(4 * N)));
  typedef uint16_t Halves __attribute__((vector_size(2 * N)));
  typedef int8_t Bytes __attribute__((vector_size(N)));
};
using Floats = Vector<LANES>::Floats;
using Ints = Vector<LANES>::Ints;
template <int N> using FloatsOf = typename Vector<N>::Floats;

template <class V> constexpr int lanes_of = sizeof(V) / sizeof(float);

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };
struct Float8 { uint8_t bits; };  // e4m3: bias 7, no infinities, NaN where all but the sign are ones

// The same numbers are in cpu_library.py.
enum Kind : int32_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, INT8 = 3, FLOAT8 = 4 };

template <class To, class From> TESSERA_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <int N = LANES> TESSERA_INLINE FloatsOf<N> load(const float* from) {
  FloatsOf<N> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <int N> TESSERA_INLINE typename Vector<N>::Words load_words(const void* from) {
  typedef typename Vector<N>::Words Words;
#ifdef __AVX512F__
  if constexpr (N == 16)
    return (Words)_mm512_maskz_cvtepu16_epi32(ALL, _mm256_loadu_si256(static_cast<const __m256i*>(from)));
#endif
#ifdef __AVX2__
  if constexpr (N == 8) return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#endif
  typename Vector<N>::Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, Words);
}

template <int N> TESSERA_INLINE typename Vector<N>::Halves sign_extend(const Float8* from) {
#ifdef __AVX2__
  if constexpr (N == 16)
    return (typename Vector<N>::Halves)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  if constexpr (N == 8)
    return (typename Vector<N>::Halves)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
  typename Vector<N>::Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, typename Vector<N>::Halves);
}

template <int N = LANES> TESSERA_INLINE FloatsOf<N> load(const BFloat16* from) {
  return bit_cast<FloatsOf<N>>(load_words<N>(from) << 16);
}

template <int N> TESSERA_INLINE FloatsOf<N> from_halves(typename Vector<N>::Halves bits) {
#ifdef __AVX512F__
  if constexpr (N == 16) return (FloatsOf<N>)_mm512_maskz_cvtph_ps(ALL, (__m256i)bits);
#endif
#ifdef __F16C__
  if constexpr (N == 8) return (FloatsOf<N>)_mm256_cvtph_ps((__m128i)bits);
#endif
  typedef typename Vector<N>::Words Words;
  const Words half = __builtin_convertvector(bits, Words);
  // Exponent and fraction moved into place, then scaled by 2^112: right for subnormals too.
  const FloatsOf<N> scaled = bit_cast<FloatsOf<N>>((half & 0x7fffu) << 13) * 0x1p112f;
  const Words special = (Words)((half & 0x7c00u) == 0x7c00u) & 0x7f800000u;  // infinities and NaN
  return bit_cast<FloatsOf<N>>(bit_cast<Words>(scaled) | special | ((half & 0x8000u) << 16));
}

template <int N = LANES> TESSERA_INLINE FloatsOf<N> load(const Half* from) {
  typename Vector<N>::Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return from_halves<N>(bits);
}

// By way of halves, in whose place a number is 256 times smaller: the exponent's bias is 15 there.
template <int N = LANES> TESSERA_INLINE FloatsOf<N> load(const Float8* from) {
  typedef typename Vector<N>::Halves Halves;
  const Halves wide = sign_extend<N>(from) << 7;
  const Halves nan = (Halves)((wide & 0x3f80) == 0x3f80);
  return from_halves<N>((wide & 0xbf80) | nan) * 256.f;
}

template <int N = LANES> TESSERA_INLINE FloatsOf<N> load(const int8_t* from) {
#ifdef __AVX512F__
  if constexpr (N == 16)
    return (FloatsOf<N>)_mm512_maskz_cvtepi32_ps(ALL, 
        _mm512_maskz_cvtepi8_epi32(ALL, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
#ifdef __AVX2__
  if constexpr (N == 8)
    return (FloatsOf<N>)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
  typename Vector<N>::Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, typename Vector<N>::Ints), FloatsOf<N>);
}

template <class V> TESSERA_INLINE void store(float* to, V x) { std::memcpy(to, &x, sizeof x); }

// Both round to nearest, ties to even; overflow becomes infinity and NaN stays NaN.
TESSERA_INLINE Half to_half(float x) {
  uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return {static_cast<uint16_t>(sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u))};
  if (bits < 0x38800000u) {  // subnormal: the addition of 0.5 leaves the rounded fraction in the low bits
    const uint32_t shifted = bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f);
    return {static_cast<uint16_t>(sign | (shifted - 0x3f000000u))};
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);  // the exponent's new bias, and half a unit in the last place
  return {static_cast<uint16_t>(sign | (bits >> 13))};
}

TESSERA_INLINE BFloat16 to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// NaN beyond 464, above which 448, the largest number, is not the nearest.
TESSERA_INLINE Float8 to_float8(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 24) & 0x80u, size = bits & 0x7fffffffu;
  const auto code = [&](uint32_t rest) { return Float8{static_cast<uint8_t>(sign | rest)}; };
  if (size > 0x43e80000u) return code(0x7fu);
  if (size < 0x3c800000u)  // subnormal: the addition of 2^14 leaves the rounded fraction in the low bits
    return code(bit_cast<uint32_t>(bit_cast<float>(size) + 0x1p14f) - 0x46800000u);
  return code(((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3));
}

TESSERA_INLINE void convert(float* to, float x) { *to = x; }
TESSERA_INLINE void convert(Half* to, float x) { *to = to_half(x); }
TESSERA_INLINE void convert(BFloat16* to, float x) { *to = to_bfloat16(x); }
TESSERA_INLINE void convert(Float8* to, float x) { *to = to_float8(x); }

// `count` is a multiple of LANES.
template <class T> TESSERA_INLINE void load_row(float* to, const T* from, int count) {
  for (int i = 0; i < count; i += LANES) store(to + i, load(from + i));
}

inline void load_row(float* to, const void* from, int64_t offset, int count, Kind kind) {
  if (kind == FLOAT32) return load_row(to, static_cast<const float*>(from) + offset, count);
  if (kind == FLOAT16) return load_row(to, static_cast<const Half*>(from) + offset, count);
  load_row(to, static_cast<const BFloat16*>(from) + offset, count);
}

template <class T> TESSERA_INLINE void store_row(T* to, const float* from, int count) {
  for (int i = 0; i < count; ++i) convert(to + i, from[i]);
}

inline void store_row(void* to, int64_t offset, const float* from, int count, Kind kind) {
  if (kind == FLOAT32) return store_row(static_cast<float*>(to) + offset, from, count);
  if (kind == FLOAT16) return store_row(static_cast<Half*>(to) + offset, from, count);
  store_row(static_cast<BFloat16*>(to) + offset, from, count);
}

template <class V> TESSERA_INLINE V larger(V a, V b) { return a > b ? a : b; }

// The lanes of a vector brought together by `join`: halves, quarters and so on down to one, the same at every level.
template <class V, class Join> TESSERA_INLINE float join_lanes(V x, Join&& join) {
  if constexpr (lanes_of<V> == 2) {
    return join(x[0], x[1]);
  } else {
    struct Half { FloatsOf<lanes_of<V> / 2> low, high; };
    const auto [low, high] = bit_cast<Half>(x);
    return join_lanes(join(low, high), join);
  }
}

template <class V> TESSERA_INLINE float sum_lanes(V x) {
  return join_lanes(x, [](auto a, auto b) { return a + b; });
}

template <class V> TESSERA_INLINE float largest_lane(V x) {
  return join_lanes(x, [](auto a, auto b) { return a > b ? a : b; });
}

// 2^x for x <= 127, to 2e-7 of the result; 0 below -126, NaN for NaN. Taylor's polynomial of degree 6 in
// x ln 2, on [-1/2, 1/2] around the nearest whole number.
template <class V> TESSERA_INLINE V exp2(V x) {
  typedef typename Vector<lanes_of<V>>::Ints Ints;
  const V lowest = V{} - 126.f;
  const V bounded = x < lowest ? lowest : x;
  const V whole = (bounded + 12582912.f) - 12582912.f;  // 1.5 * 2^23: rounds to the nearest
  const V f = bounded - whole;
  const V power =
      1.f + f * (0.693147181f + f * (0.240226507f + f * (0.0555041087f + f * (0.00961812911f +
      f * (0.00133335581f + f * 0.000154035304f)))));
  const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
  const V result = power * bit_cast<V>(exponent);
  return x < lowest ? V{} : result;
}

// tanh(x) to 4e-7 of the result: a series near 0, where the quotient would cancel.
template <class V> TESSERA_INLINE V tanh(V x) {
  const V size = x < 0.f ? -x : x;
  const V e = exp2(size * -2.88539008f);  // exp(-2 |x|)
  const V quotient = (1.f - e) / (1.f + e);
  const V square = x * x;
  const V series =
      x * (1.f + square * (-0.333333333f + square * (0.133333333f + square * (-0.0539682540f +
      square * 0.0218694885f))));
  return size < 0.25f ? series : (x < 0.f ? -quotient : quotient);
}

}  // namespace tessera
