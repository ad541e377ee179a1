// Paged attention without tensor cores, in float32: for float32 models, and for pairs of query and cache type that
// the tensor cores do not take. A warp has one query row; a lane has one key for the scores, and columns for the values.
#pragma once
#include <ptx.cuh>

#include "attention_tile.cuh"
#include "float8.cuh"

constexpr int PLAIN_ROWS = 4;   // warps of a block, a row each
constexpr int PLAIN_KEYS = 32;  // keys of a tile, one a lane

__device__ __forceinline__ float warp_max(float x) {
  for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// One tile of keys or values to float; what no row of the tile sees becomes zeros.
template <class C, int HEAD_DIM>
__device__ __forceinline__ void load_plain_tile(const AttentionArguments& a, const Tile& tile, float* to, int pitch,
                                                const void* cache, const float* scales, int first) {
  for (int i = threadIdx.x; i < PLAIN_KEYS * HEAD_DIM; i += PLAIN_ROWS * 32) {
    const int key = i / HEAD_DIM, column = i % HEAD_DIM, slot = find_slot(a, tile, first + key);
    float value = 0.f;
    if (slot >= 0) {
      const long long head = static_cast<long long>(slot) * a.num_kv_heads + blockIdx.y;
      value = to_float(static_cast<const C*>(cache)[head * HEAD_DIM + column]);
      if constexpr (same_type<C, int8>) value *= scales[head];
    }
    to[key * pitch + column] = value;
  }
}

// Grid (tiles, num_kv_heads, num_splits), 32 * PLAIN_ROWS threads; at 4 blocks a multiprocessor nothing is spilled.
template <class T, class C, int HEAD_DIM>
__global__ void __launch_bounds__(PLAIN_ROWS * 32, 4) attend_plain(const AttentionArguments a) {
  constexpr int COLUMNS = (HEAD_DIM + 31) / 32, PITCH = HEAD_DIM + 1;  // a pitch that is odd: no bank conflicts
  const Tile tile = find_tile<PLAIN_ROWS>(a);
  if (tile.row0 >= tile.num_rows) return;
  if (tile.begin >= tile.end) return write_nothing<PLAIN_ROWS>(a, tile);

  DYNAMIC_SHARED(memory);
  float* queries = reinterpret_cast<float*>(memory);  // [PLAIN_ROWS, HEAD_DIM]
  float* keys = queries + PLAIN_ROWS * HEAD_DIM;      // [PLAIN_KEYS, PITCH]
  float* values = keys + PLAIN_KEYS * PITCH;          // [PLAIN_KEYS, HEAD_DIM]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = tile.row0 + warp;
  const int position = row_position(a, tile, row);
  const int row_begin = max(first_visible(a, position), tile.begin);
  const int row_end = row < tile.num_rows ? min(position + 1, tile.end) : 0;

  const int token = tile.first_token + (row < tile.num_rows ? row / a.group : 0);
  const T* query = static_cast<const T*>(a.q) + token * a.q_stride + (blockIdx.y * a.group + row % a.group) * HEAD_DIM;
  for (int column = lane; column < HEAD_DIM; column += 32) queries[warp * HEAD_DIM + column] = to_float(query[column]);

  Softmax softmax;
  float weighted[COLUMNS] = {};
  for (int first = tile.begin / PLAIN_KEYS * PLAIN_KEYS; first < tile.end; first += PLAIN_KEYS) {
    __syncthreads();  // the tile before has been read
    load_plain_tile<C, HEAD_DIM>(a, tile, keys, PITCH, a.key_cache, a.key_scales, first);
    load_plain_tile<C, HEAD_DIM>(a, tile, values, HEAD_DIM, a.value_cache, a.value_scales, first);
    __syncthreads();
    float dot = 0.f;
    for (int d = 0; d < HEAD_DIM; ++d) dot += queries[warp * HEAD_DIM + d] * keys[lane * PITCH + d];
    const bool visible = first + lane >= row_begin && first + lane < row_end;
    const float score = visible ? to_score(a, dot) : -infinity(), before = softmax.top;
    softmax.top = fmaxf(before, warp_max(score));
    const float keep = exp2f(before - softmax.base()), weight = exp2f(score - softmax.base());
    softmax.sum = softmax.sum * keep + warp_sum(weight);
    for (int j = 0; j < COLUMNS; ++j) weighted[j] *= keep;
    for (int key = 0; key < PLAIN_KEYS; ++key) {
      const float of_key = __shfl_sync(~0u, weight, key);
      for (int j = 0; j < COLUMNS; ++j)
        if (j * 32 + lane < HEAD_DIM) weighted[j] += of_key * values[key * HEAD_DIM + j * 32 + lane];
    }
  }
  if (row >= tile.num_rows) return;
  for (int j = 0; j < COLUMNS; ++j)
    if (j * 32 + lane < HEAD_DIM) write_result<T, HEAD_DIM>(a, tile, row, j * 32 + lane, weighted[j], softmax);
}
