// Writing this step's keys and values into their slots, and copying whole blocks.
#pragma once
#include "elements.cuh"
#include "float8.cuh"

struct WriteSide {
  const void* source;  // [num_tokens, num_kv_heads, head_dim]
  void* cache;         // [num_blocks, block_size, num_kv_heads, head_dim]
  float* scales;       // [num_blocks, block_size, num_kv_heads], for an int8 cache only
  long long stride;    // elements from token to token in `source`
};

// Mirrored by cuda_launch.WriteArguments.
struct WriteArguments {
  WriteSide keys, values;
  const long long* slot_mapping;  // [num_tokens], -1 is skipped
  int num_tokens, num_kv_heads;
};

constexpr int WRITE_WARPS = 4;

// Unlike fmaxf it keeps a NaN: int8 has none, so the scale of such a row is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// A warp writes one head of one token. Grid (num_tokens * num_kv_heads / WRITE_WARPS rounded up, 2: keys, values).
template <class T, class C, int HEAD_DIM>
__global__ void __launch_bounds__(WRITE_WARPS * 32) write_kv(const WriteArguments a) {
  const int lane = threadIdx.x % 32;
  const WriteSide side = blockIdx.y == 0 ? a.keys : a.values;
  const long long item = static_cast<long long>(blockIdx.x) * WRITE_WARPS + threadIdx.x / 32;
  const int token = static_cast<int>(item / a.num_kv_heads), head = static_cast<int>(item % a.num_kv_heads);
  if (token >= a.num_tokens) return;
  const long long slot = a.slot_mapping[token];
  if (slot < 0) return;

  const T* from = static_cast<const T*>(side.source) + token * side.stride + head * HEAD_DIM;
  const long long cell = slot * a.num_kv_heads + head;
  C* to = static_cast<C*>(side.cache) + cell * HEAD_DIM;
  if constexpr (same_type<C, int8>) {
    float largest = 0.f;
    for (int d = lane; d < HEAD_DIM; d += 32) largest = max_or_nan(largest, fabsf(to_float(from[d])));
    for (int distance = 16; distance; distance /= 2)
      largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, distance));
    const bool finite = largest < infinity();
    const float scale = largest / 127.f;
    for (int d = lane; d < HEAD_DIM; d += 32)
      to[d] = static_cast<int8>(finite && scale > 0.f ? __float2int_rn(to_float(from[d]) / scale) : 0);
    if (lane == 0) side.scales[cell] = finite ? scale : not_a_number();
  } else {
    for (int d = lane; d < HEAD_DIM; d += 32) store(to + d, to_float(from[d]));
  }
}

// Mirrored by cuda_launch.CopyArguments.
struct CopyArguments {
  const int2* pairs;                // [num_pairs] (source, target); no target is a source as well
  unsigned char* const* caches;     // [num_caches]
  const long long* bytes_of_block;  // [num_caches], multiples of 16
};

// Grid (num_pairs, num_caches): all caches of all layers in one launch.
__global__ void __launch_bounds__(256) copy_blocks(const CopyArguments a) {
  const int2 pair = a.pairs[blockIdx.x];
  const long long bytes = a.bytes_of_block[blockIdx.y];
  const uint4* from = reinterpret_cast<const uint4*>(a.caches[blockIdx.y] + pair.x * bytes);
  uint4* to = reinterpret_cast<uint4*>(a.caches[blockIdx.y] + pair.y * bytes);
  for (long long i = threadIdx.x; i < bytes / 16; i += 256) to[i] = from[i];
}
