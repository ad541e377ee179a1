// CUDA C++ for g++: the keywords, types and functions that the kernels use, and no more.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "fibers.hpp"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static  // blocks run one after another
#define threadIdx (shim::self->index)
#define blockIdx (shim::block.index)

struct int2 { int x, y; };
struct alignas(4) char4 { signed char x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
using std::max;
using std::min;

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
inline float __half2float(__half h) { return static_cast<float>(std::bit_cast<_Float16>(h.bits)); }
inline __half __float2half_rn(float f) { return {std::bit_cast<uint16_t>(static_cast<_Float16>(f))}; }
inline float __bfloat162float(__nv_bfloat16 b) { return std::bit_cast<float>(uint32_t{b.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  if (f != f) return {0x7fff};
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to even
}
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float f) { return std::bit_cast<int>(f); }
inline int __float2int_rn(float f) { return static_cast<int>(std::nearbyint(f)); }

inline void __syncthreads(shim::Place place = shim::Place::current()) { shim::meet(shim::block.all, place, true); }

namespace shim {
// Every lane offers words; returns the table of all lanes' offers, good until the lane's next exchange.
template <int WORDS>
UNSEEN const uint32_t (*exchange(const uint32_t (&mine)[WORDS], const Place& place))[OFFERED] {
  static_assert(WORDS <= OFFERED);
  Warp& warp = my_warp();
  auto& offers = warp.offers[warp.generation % 2];
  for (int i = 0; i < WORDS; ++i) offers[lane()][i] = mine[i];
  meet(warp, place, false);
  return offers;
}
UNSEEN inline float shuffle(unsigned mask, float value, int source, const Place& place) {
  if (mask != ~0u) fail("only shuffles of whole warps are modelled: " + at(place));
  // The builtin is no call: the standard's function would read a neighbour's offer where ThreadSanitizer sees it.
  const uint32_t mine[1] = {__builtin_bit_cast(uint32_t, value)};
  return __builtin_bit_cast(float, exchange(mine, place)[source][0]);
}
}  // namespace shim
inline float __shfl_sync(unsigned mask, float value, int source, shim::Place place = shim::Place::current()) {
  return shim::shuffle(mask, value, source % shim::LANES, place);
}
inline float __shfl_xor_sync(unsigned mask, float value, int bits, shim::Place place = shim::Place::current()) {
  return shim::shuffle(mask, value, shim::lane() ^ bits, place);
}
