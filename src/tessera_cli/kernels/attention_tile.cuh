// What one thread block attends to: a tile of query rows of one sequence, and one split of the keys it can see.
//
// Rows. The query tokens of a sequence times the query heads that share a KV head are laid end to end: row r is
// token r / group, head r % group. So a tile is full in decode (several heads of one token) as in prefill.
//
// Tiles. Their number is known on the device only, and a captured graph must not ask. The grid has
// num_tokens * group / ROWS + num_seqs tiles, which is always enough: sequence i owns the tiles from
// query_start_loc[i] * group / ROWS + i on, and what it does not need returns at once.
//
// Splits. Boundaries are at multiples of split_len in the sequence, so how a sequence is split depends neither on its
// neighbours nor on the chunk that its queries come in. A sliding window moves the first split, so no block that no row
// of the tile can see is read.
#pragma once
#include "elements.cuh"

// Mirrored by cuda_launch.AttentionArguments; nothing else is passed to the attention kernels.
struct AttentionArguments {
  void* out;                   // [num_tokens, num_kv_heads * group, head_dim]
  const void* q;               // like out, q_stride elements from token to token
  const void* key_cache;       // [num_blocks, block_size, num_kv_heads, head_dim]
  const void* value_cache;     // like key_cache
  const float* key_scales;     // [num_blocks, block_size, num_kv_heads], for an int8 cache only
  const float* value_scales;   // like key_scales
  const int* block_tables;     // [num_seqs, max_blocks]
  const int* query_start_loc;  // [num_seqs + 1]
  const int* seq_lens;         // [num_seqs], tokens in the cache after this step
  float* partial_out;          // [num_tokens, num_heads, num_splits, head_dim], where num_splits > 1
  float2* partial_softmax;     // [num_tokens, num_heads, num_splits]: maximum (base 2) and sum
  long long q_stride;
  int num_seqs, max_blocks, block_shift, num_kv_heads, group, num_splits, split_len;
  int window;      // tokens that a row sees, itself included; 0 for all
  float scale;     // of the scores, natural base
  float soft_cap;  // 0 for none
};

constexpr float LOG2_E = 1.4426950408889634f;

struct Tile {
  int sequence, first_token;   // the sequence, and its first packed token
  int first_position;          // of that token in the sequence
  int row0, num_rows;          // the tile's first row, and the rows of the whole sequence
  int begin, end;              // positions that some row of the tile sees in this split
};

__device__ __forceinline__ int row_position(const AttentionArguments& a, const Tile& t, int row) {
  return t.first_position + row / a.group;
}
__device__ __forceinline__ int first_visible(const AttentionArguments& a, int position) {
  return a.window ? max(0, position - a.window + 1) : 0;
}

// The tile of this thread block, from blockIdx.x; row0 >= num_rows if it has none.
template <int ROWS>
__device__ __forceinline__ Tile find_tile(const AttentionArguments& a) {
  const auto first_tile = [&](int sequence) {
    return static_cast<int>(static_cast<long long>(a.query_start_loc[sequence]) * a.group / ROWS) + sequence;
  };
  const int index = blockIdx.x;
  int low = 0, high = a.num_seqs;  // the last sequence in [low, high) whose first tile is not after this one
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tile(middle) <= index)
      low = middle;
    else
      high = middle;
  }
  Tile t;
  t.sequence = low;
  t.first_token = a.query_start_loc[low];
  const int num_queries = a.query_start_loc[low + 1] - t.first_token;
  t.first_position = a.seq_lens[low] - num_queries;
  t.row0 = (index - first_tile(low)) * ROWS;
  t.num_rows = num_queries * a.group;
  if (t.row0 >= t.num_rows) return t;

  const int last_row = min(t.row0 + ROWS, t.num_rows) - 1;
  const int lowest = first_visible(a, row_position(a, t, t.row0));
  const int split_begin = (lowest / a.split_len + blockIdx.z) * a.split_len;
  t.begin = max(lowest, split_begin);
  t.end = min(row_position(a, t, last_row) + 1, split_begin + a.split_len);
  return t;
}

// The cache slot of a position of the tile's sequence; -1 outside of what the tile sees.
__device__ __forceinline__ int find_slot(const AttentionArguments& a, const Tile& t, int position) {
  if (position < t.begin || position >= t.end) return -1;
  const int* table = a.block_tables + static_cast<long long>(t.sequence) * a.max_blocks;
  const int offset = position & ((1 << a.block_shift) - 1);
  return (table[position >> a.block_shift] << a.block_shift) + offset;
}

// A score in base 2 from a dot product. The cap comes before the mask, as models are trained.
__device__ __forceinline__ float to_score(const AttentionArguments& a, float dot) {
  if (a.soft_cap == 0.f) return dot * (a.scale * LOG2_E);
  return a.soft_cap * LOG2_E * tanhf(dot * a.scale / a.soft_cap);
}

// Running maximum and sum of one row, in base 2. A row that has seen nothing has (-inf, 0) and gives no NaN.
struct Softmax {
  float top = -infinity(), sum = 0.f;

  // What the exponents are taken against: any finite number serves where there is no score yet.
  __device__ __forceinline__ float base() const { return top == -infinity() ? 0.f : top; }
};

__device__ __forceinline__ long long query_row(const AttentionArguments& a, const Tile& t, int row) {
  return (static_cast<long long>(t.first_token + row / a.group) * a.num_kv_heads + blockIdx.y) * a.group +
         row % a.group;
}

// One element of a row's weighted values: to the output where there is one split, else to its partial result.
template <class T, int HEAD_DIM>
__device__ __forceinline__ void write_result(const AttentionArguments& a, const Tile& t, int row, int column,
                                             float value, const Softmax& softmax) {
  const long long to = query_row(a, t, row);
  if (a.num_splits == 1) {
    store(static_cast<T*>(a.out) + to * HEAD_DIM + column, value / softmax.sum);
    return;
  }
  const long long part = to * a.num_splits + blockIdx.z;
  a.partial_out[part * HEAD_DIM + column] = value;
  if (column == 0) a.partial_softmax[part] = make_float2(softmax.top, softmax.sum);
}

// A split without keys for this tile says so; its partial_out stays unwritten and is never read.
template <int ROWS>
__device__ __forceinline__ void write_nothing(const AttentionArguments& a, const Tile& t) {
  const int row = t.row0 + threadIdx.x;
  if (threadIdx.x >= ROWS || row >= t.num_rows) return;
  a.partial_softmax[query_row(a, t, row) * a.num_splits + blockIdx.z] = make_float2(-infinity(), 0.f);
}
