// The element types of queries, outputs and KV caches: float, half, bfloat16, and int8 beside a scale;
// float8.cuh has one more.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using int8 = signed char;

// NVRTC has neither INFINITY nor NAN.
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(int8 x) { return static_cast<float>(x); }

__device__ __forceinline__ void store(float* to, float x) { *to = x; }
__device__ __forceinline__ void store(__half* to, float x) { *to = __float2half_rn(x); }
__device__ __forceinline__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// Two neighbours in one register, as tensor cores take them; `low` has the lower address.
template <class T>
__device__ __forceinline__ unsigned pack(float low, float high) {
  union {
    T half[2];
    unsigned word;
  } pair;
  store(&pair.half[0], low);
  store(&pair.half[1], high);
  return pair.word;
}

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;
