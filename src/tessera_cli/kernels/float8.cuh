// float8 e4m3 as a cache stores it: a sign, four bits of exponent with a bias of 7, three of fraction. There are no
// infinities; NaN is where all but the sign are ones. sm_89 and later convert by an instruction, others by arithmetic to
// the same bits.
#pragma once
#include "elements.cuh"

struct fp8 { unsigned char bits; };

__device__ __forceinline__ float to_float(fp8 x) {
  const unsigned rest = x.bits & 0x7f;
  // As a float's exponent and fraction it is 2^120 times smaller; right for subnormals too.
  const float size = rest == 0x7f ? not_a_number() : __int_as_float(rest << 20) * 0x1p120f;
  return x.bits & 0x80 ? -size : size;
}

// To the nearest, ties to even; NaN beyond 464, above which 448, the largest number, is not the nearest.
__device__ __forceinline__ void store(fp8* to, float x) {
  const float size = fabsf(x);
  unsigned code = 0x7f;
#if __CUDA_ARCH__ >= 890
  if (size <= 464.f) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
    code = pair & 0xff;
  }
#else
  const unsigned sign = __float_as_int(x) >> 24 & 0x80, bits = __float_as_int(size);
  if (size < 0x1p-6f)  // subnormal: the addition of 2^14 leaves the rounded fraction in the low bits
    code = sign | (__float_as_int(size + 0x1p14f) - 0x46800000);
  else if (size <= 464.f)
    code = sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
#endif
  to->bits = static_cast<unsigned char>(code);
}

// Two neighbours, exactly, as `pack` arranges them; `pair` has the lower address in its low byte.
template <class T>
__device__ __forceinline__ unsigned unpack(unsigned pair) {
#if __CUDA_ARCH__ >= 890
  union {
    unsigned word;
    __half half[2];
  } both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both.word) : "h"(static_cast<unsigned short>(pair)));
  if constexpr (same_type<T, __half>) return both.word;
  return pack<T>(to_float(both.half[0]), to_float(both.half[1]));
#else
  return pack<T>(to_float(fp8{static_cast<unsigned char>(pair)}), to_float(fp8{static_cast<unsigned char>(pair >> 8)}));
#endif
}
