// Paged attention on tensor cores: one kernel for decode, prefill, chunked prefill and verification.
//
// A thread block takes 16 or more query rows (attention_tile.cuh says which) of one KV head and walks over the keys
// they can see, KEYS at a time. Keys and values go from their blocks in the cache to shared memory by cp.async, a tile
// ahead of the arithmetic; their slots are looked up a tile ahead of that. The softmax is online, in base 2.
//
// ROW_WARPS = 1 (decode): 16 rows, the warps share out each tile's keys and merge their results at the end.
// ROW_WARPS = WARPS (prefill): each warp has 16 rows of its own and sees all keys, so a key is read once for all rows.
//
// float32, and pairs of query and cache type that tensor cores do not take, go through attend_plain.
#include <ptx.cuh>

#include "attend_plain.cuh"
#include "attention_tile.cuh"
#include "elements.cuh"
#include "float8.cuh"
#include "kv_cache.cuh"
#include "merge_splits.cuh"

// T: of queries and output, half or bfloat16. C: of the cache, T, int8 or fp8.
template <class T, class C, int HEAD_DIM, int ROW_WARPS>
struct Shape {
  // With 256 elements a row, four warps' tiles would not fit the 99 KB of sm_86, sm_89 and sm_120.
  static constexpr int WARPS = HEAD_DIM > 128 ? 2 : 4;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int KEY_WARPS = WARPS / ROW_WARPS;
  static constexpr int ROWS = 16 * ROW_WARPS;
  static constexpr int KEYS = 16 * WARPS;
  static constexpr int WARP_KEYS = KEYS / KEY_WARPS;
  static constexpr int PITCH = HEAD_DIM + 8;  // elements; 8 rows of a matrix then fall into different banks
  static constexpr bool CONVERTS = !same_type<T, C>, SCALES = same_type<C, int8>;
  static_assert(ROW_WARPS == 1 || ROW_WARPS == WARPS);
};

// Where everything is in shared memory; cuda.py computes the same size. Keys and values of a tile lie behind each other.
template <class T, class C, int HEAD_DIM, int ROW_WARPS>
struct SharedTiles {
  using S = Shape<T, C, HEAD_DIM, ROW_WARPS>;
  static constexpr int TILE = 2 * S::KEYS * S::PITCH, RAW = 2 * S::KEYS * HEAD_DIM;
  unsigned char* memory;

  // [ROWS, PITCH]
  __device__ __forceinline__ T* queries() const { return reinterpret_cast<T*>(memory); }
  // [2, KEYS, PITCH], what tensor cores read: one of each stage, or the one that is converted into.
  __device__ __forceinline__ T* operands(int stage) const {
    return queries() + S::ROWS * S::PITCH + (S::CONVERTS ? 0 : stage * TILE);
  }
  // Converted types only: [2, KEYS, HEAD_DIM] of each stage as it is in the cache, then, for int8, float [2, KEYS] of
  // each stage.
  __device__ __forceinline__ C* raw(int stage) const {
    return reinterpret_cast<C*>(operands(0) + TILE) + stage * RAW;
  }
  __device__ __forceinline__ float* scales(int stage) const {
    return reinterpret_cast<float*>(raw(2)) + stage * 2 * S::KEYS;
  }
  // [KEY_WARPS, 16, HEAD_DIM], over the operands once they have been read.
  __device__ __forceinline__ float* warp_values() const { return reinterpret_cast<float*>(operands(0)); }
};

template <class T, class C, int HEAD_DIM, int ROW_WARPS>
struct TensorCoreAttention {
  using S = Shape<T, C, HEAD_DIM, ROW_WARPS>;
  using Shared = SharedTiles<T, C, HEAD_DIM, ROW_WARPS>;
  static constexpr bool KEEPS_QUERIES = HEAD_DIM <= 128;  // in registers; with 256 there are none to spare

  const AttentionArguments& a;
  const Tile& tile;
  const Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_warp = warp % ROW_WARPS, key_warp = warp / ROW_WARPS;
  // A lane has rows lane / 4 and lane / 4 + 8 of its warp's 16, and of each 8 columns 2 * (lane % 4) and the next.
  int row_begin[2], row_end[2];  // the positions that these rows see
  unsigned queries[KEEPS_QUERIES ? HEAD_DIM / 16 : 1][4];
  float values[HEAD_DIM / 8][4] = {};
  Softmax softmax[2];

  __device__ __forceinline__ TensorCoreAttention(const AttentionArguments& a, const Tile& tile, Shared shared)
      : a(a), tile(tile), shared(shared) {
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row0 + lane_row(half), position = row_position(a, tile, row);
      row_begin[half] = first_visible(a, position);
      row_end[half] = row < tile.num_rows ? position + 1 : 0;
    }
  }

  __device__ __forceinline__ int lane_row(int half) const { return row_warp * 16 + half * 8 + lane / 4; }

  __device__ __forceinline__ void copy_queries() const {
    constexpr int CHUNKS = HEAD_DIM / 8;
    for (int i = threadIdx.x; i < S::ROWS * CHUNKS; i += S::THREADS) {
      const int row = tile.row0 + i / CHUNKS, column = i % CHUNKS * 8;
      const bool valid = row < tile.num_rows;
      const int token = tile.first_token + (valid ? row / a.group : 0);
      const long long head = blockIdx.y * a.group + row % a.group;
      const T* from = static_cast<const T*>(a.q) + token * a.q_stride + head * HEAD_DIM + column;
      copy_async<16>(shared.queries() + i / CHUNKS * S::PITCH + column, from, valid);
    }
  }

  __device__ __forceinline__ void keep_queries() {
    if constexpr (KEEPS_QUERIES)
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) load_query(queries[k], k * 16);
  }

  __device__ __forceinline__ void load_query(unsigned (&a_fragment)[4], int column) const {
    load_matrices(a_fragment, shared.queries() + (row_warp * 16 + lane % 16) * S::PITCH + column + lane / 16 * 8);
  }

  // Start copying a tile; keys that no row sees become zeros, as a weight of 0 times an old NaN would be NaN.
  __device__ __forceinline__ void copy_keys(const int* slots, int stage) const {
    constexpr int CHUNK = 16 / sizeof(C), CHUNKS = HEAD_DIM / CHUNK, PITCH = S::CONVERTS ? HEAD_DIM : S::PITCH;
    C* keys;
    if constexpr (S::CONVERTS)
      keys = shared.raw(stage);
    else
      keys = shared.operands(stage);
    for (int i = threadIdx.x; i < S::KEYS * CHUNKS; i += S::THREADS) {
      const int key = i / CHUNKS, column = i % CHUNKS * CHUNK, slot = slots[key];
      const long long from =
          (static_cast<long long>(max(slot, 0)) * a.num_kv_heads + blockIdx.y) * HEAD_DIM + column;
      C* to = keys + key * PITCH + column;
      copy_async<16>(to, static_cast<const C*>(a.key_cache) + from, slot >= 0);
      copy_async<16>(to + S::KEYS * PITCH, static_cast<const C*>(a.value_cache) + from, slot >= 0);
    }
    if constexpr (S::SCALES)
      if (threadIdx.x < S::KEYS) {
        const int slot = slots[threadIdx.x];
        const long long from = static_cast<long long>(max(slot, 0)) * a.num_kv_heads + blockIdx.y;
        copy_async<4>(shared.scales(stage) + threadIdx.x, a.key_scales + from, slot >= 0);
        copy_async<4>(shared.scales(stage) + S::KEYS + threadIdx.x, a.value_scales + from, slot >= 0);
      }
  }

  // int8 or fp8 to T, for keys and values of one stage.
  __device__ __forceinline__ void convert(int stage) const {
    constexpr int CHUNKS = HEAD_DIM / 4;
    for (int i = threadIdx.x; i < 2 * S::KEYS * CHUNKS; i += S::THREADS) {
      const int key = i / CHUNKS, column = i % CHUNKS * 4;
      const C* from = shared.raw(stage) + key * HEAD_DIM + column;
      uint2 pair;
      if constexpr (S::SCALES) {
        const char4 packed = *reinterpret_cast<const char4*>(from);
        const float scale = shared.scales(stage)[key];
        pair.x = pack<T>(packed.x * scale, packed.y * scale);
        pair.y = pack<T>(packed.z * scale, packed.w * scale);
      } else {
        const unsigned packed = *reinterpret_cast<const unsigned*>(from);
        pair.x = unpack<T>(packed);
        pair.y = unpack<T>(packed >> 16);
      }
      *reinterpret_cast<uint2*>(shared.operands(0) + key * S::PITCH + column) = pair;
    }
  }

  // One tile of keys in shared memory, the first of them at position `first`.
  __device__ __forceinline__ void attend(int stage, int first) {
    const T* keys = shared.operands(stage) + key_warp * S::WARP_KEYS * S::PITCH;
    const T* key_values = keys + S::KEYS * S::PITCH;
    float scores[S::WARP_KEYS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM; k += 16) {
      unsigned loaded[4];
      if constexpr (!KEEPS_QUERIES) load_query(loaded, k);
      const unsigned(&query)[4] = KEEPS_QUERIES ? queries[k / 16 % (sizeof(queries) / 16)] : loaded;
#pragma unroll
      for (int n = 0; n < S::WARP_KEYS; n += 16) {
        unsigned b[4];
        load_matrices(b, keys + (n + lane / 16 * 8 + lane % 8) * S::PITCH + k + lane / 8 % 2 * 8);
        multiply_add(scores[n / 8], query, b[0], b[1], T());
        multiply_add(scores[n / 8 + 1], query, b[2], b[3], T());
      }
    }
    weigh(scores, first + key_warp * S::WARP_KEYS);
#pragma unroll
    for (int n = 0; n < S::WARP_KEYS; n += 16) {
      const float(&left)[4] = scores[n / 8], (&right)[4] = scores[n / 8 + 1];
      const unsigned weights[4] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]),
                                   pack<T>(right[0], right[1]), pack<T>(right[2], right[3])};
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += 16) {
        unsigned b[4];
        load_matrices_transposed(b, key_values + (n + lane % 16) * S::PITCH + d + lane / 16 * 8);
        multiply_add(values[d / 8], weights, b[0], b[1], T());
        multiply_add(values[d / 8 + 1], weights, b[2], b[3], T());
      }
    }
  }

  // Dot products become weights; what was summed before is rescaled to the new maximum.
  __device__ __forceinline__ void weigh(float (&scores)[S::WARP_KEYS / 8][4], int first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Softmax& row = softmax[half];
      const Softmax before = row;
#pragma unroll
      for (int i = 0; i < S::WARP_KEYS / 4; ++i) {
        float& score = scores[i / 2][half * 2 + i % 2];
        const int position = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
        const bool visible = position >= max(row_begin[half], tile.begin) && position < min(row_end[half], tile.end);
        score = visible ? to_score(a, score) : -infinity();
        row.top = fmaxf(row.top, score);
      }
      row.top = fmaxf(row.top, __shfl_xor_sync(~0u, row.top, 1));
      row.top = fmaxf(row.top, __shfl_xor_sync(~0u, row.top, 2));
      const float keep = exp2f(before.top - row.base());
      row.sum *= keep;  // of this lane's columns only; the four lanes of a row are added in `finish`
#pragma unroll
      for (int i = 0; i < S::WARP_KEYS / 4; ++i) {
        float& score = scores[i / 2][half * 2 + i % 2];
        score = exp2f(score - row.base());
        row.sum += score;
      }
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
        values[d][half * 2] *= keep;
        values[d][half * 2 + 1] *= keep;
      }
    }
  }

  __device__ __forceinline__ void add_row_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax[half].sum += __shfl_xor_sync(~0u, softmax[half].sum, 1);
      softmax[half].sum += __shfl_xor_sync(~0u, softmax[half].sum, 2);
    }
  }

  // visit(row of the tile, column, value, softmax) for each element that this lane holds.
  template <class Visit>
  __device__ __forceinline__ void each_value(Visit visit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 4; ++i)
        visit(lane_row(half), i / 2 * 8 + lane % 4 * 2 + i % 2, values[i / 2][half * 2 + i % 2], softmax[half]);
  }

  // Where warps have shared out the keys, their results meet in shared memory, over the tiles' place.
  __device__ __forceinline__ void merge_warps() const {
    __shared__ float2 parts[S::KEY_WARPS][16];  // maximum and sum
    float* all = shared.warp_values();
    __syncthreads();  // every warp has read its last tile
    each_value([&](int row, int column, float value, const Softmax& part) {
      all[(key_warp * 16 + row) * HEAD_DIM + column] = value;
      if (column == 0) parts[key_warp][row] = make_float2(part.top, part.sum);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * HEAD_DIM; i += S::THREADS) {
      const int row = i / HEAD_DIM, column = i % HEAD_DIM;
      if (tile.row0 + row >= tile.num_rows) break;
      Softmax total;
      for (int w = 0; w < S::KEY_WARPS; ++w) total.top = fmaxf(total.top, parts[w][row].x);
      float value = 0.f;
      for (int w = 0; w < S::KEY_WARPS; ++w) {
        const float weight = exp2f(parts[w][row].x - total.base());
        total.sum += weight * parts[w][row].y;
        value += weight * all[(w * 16 + row) * HEAD_DIM + column];
      }
      write_result<T, HEAD_DIM>(a, tile, tile.row0 + row, column, value, total);
    }
  }

  __device__ __forceinline__ void finish() {
    add_row_sums();
    if constexpr (S::KEY_WARPS > 1)
      merge_warps();
    else
      each_value([&](int row, int column, float value, const Softmax& total) {
        if (tile.row0 + row < tile.num_rows)
          write_result<T, HEAD_DIM>(a, tile, tile.row0 + row, column, value, total);
      });
  }
};

// Grid (tiles, num_kv_heads, num_splits), THREADS threads.
template <class T, class C, int HEAD_DIM, int ROW_WARPS>
__global__ void __launch_bounds__(Shape<T, C, HEAD_DIM, ROW_WARPS>::THREADS)
    attend_tensor_core(const AttentionArguments a) {
  using S = Shape<T, C, HEAD_DIM, ROW_WARPS>;
  const Tile tile = find_tile<S::ROWS>(a);
  if (tile.row0 >= tile.num_rows) return;
  if (tile.begin >= tile.end) return write_nothing<S::ROWS>(a, tile);

  DYNAMIC_SHARED(memory);
  __shared__ int slots[2][S::KEYS];
  TensorCoreAttention<T, C, HEAD_DIM, ROW_WARPS> attention(a, tile, {memory});

  // Tiles of keys are at multiples of KEYS, so the order of additions does not depend on where a chunk starts.
  const int first = tile.begin / S::KEYS * S::KEYS;
  const auto find_slots = [&](int number) {
    if (threadIdx.x < S::KEYS)
      slots[number % 2][threadIdx.x] = find_slot(a, tile, first + number * S::KEYS + threadIdx.x);
  };
  find_slots(0);
  find_slots(1);
  attention.copy_queries();
  __syncthreads();  // slots
  attention.copy_keys(slots[0], 0);
  for (int number = 0; first + number * S::KEYS < tile.end; ++number) {
    const int stage = number % 2;
    copy_async_wait();
    __syncthreads();  // tile `number` and slots of the next have arrived; the tile before it has been read
    if (number == 0) attention.keep_queries();
    if (first + (number + 1) * S::KEYS < tile.end) attention.copy_keys(slots[1 - stage], 1 - stage);
    find_slots(number + 2);
    if constexpr (S::CONVERTS) {
      attention.convert(stage);
      __syncthreads();  // converted by all
    }
    attention.attend(stage, first + number * S::KEYS);
  }
  attention.finish();
}
