// The paged cache of one layer, the tables of one step, and writing a step's keys and values.
#pragma once

#include "vectors.hpp"

namespace tessera {

// One layer's cache and numbers; laid out as `Layer` in cpu_library.py.
//
// A block's keys are stored [num_kv_heads, head_dim, block_size], so that scores of eight keys need no horizontal
// sums, and its values [num_kv_heads, block_size, head_dim]. int8 caches have a scale for each token and head,
// [num_kv_heads, block_size].
struct Layer {
  void* keys;
  void* values;
  float* key_scales;  // null unless int8
  float* value_scales;
  int32_t kind;        // of keys and values
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;    // a multiple of 8
  int32_t block_size;  // 8, 16, 32, 64 or 128
  int32_t window;      // positions that a query sees, 0 for all
  float scale;
  float soft_cap;  // 0 for none

  int64_t block(int64_t block, int head) const {  // in elements
    return (block * num_kv_heads + head) * block_size * head_dim;
  }
  int64_t scales(int64_t block, int head) const { return (block * num_kv_heads + head) * block_size; }
};

// The tables of one step, as AttentionMetadata describes them; laid out as `Step` in cpu_library.py.
struct Step {
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const int64_t* slot_mapping;
  int32_t num_seqs;
  int32_t table_width;
  int64_t num_tokens;
};

// Packed rows of one step: token t's heads are contiguous and start at element t * stride.
struct Rows {
  const void* data;
  int64_t stride;
  Kind kind;
};

template <class T>
void write_row(const Layer& layer, int64_t block, int offset, int head, const float* key, const float* value) {
  T* keys = static_cast<T*>(layer.keys) + layer.block(block, head) + offset;
  for (int d = 0; d < layer.head_dim; ++d) convert(keys + int64_t{d} * layer.block_size, key[d]);
  store_row(static_cast<T*>(layer.values) + layer.block(block, head) + int64_t{offset} * layer.head_dim, value,
            layer.head_dim);
}

// Symmetric: the largest magnitude becomes 127. A row that is not finite gets a NaN scale, so that it reads as NaN.
inline float int8_scale(const float* row, int count) {
  float top = 0;
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    const float size = std::fabs(row[i]);
    finite &= size <= 3.402823466e38f;
    top = size > top ? size : top;
  }
  return finite ? top / 127.f : NAN;
}

inline int8_t to_int8(float x, float scale) {
  return scale > 0.f ? static_cast<int8_t>(std::fmin(std::fmax(std::nearbyint(x / scale), -127.f), 127.f)) : 0;
}

template <>
inline void write_row<int8_t>(const Layer& layer, int64_t block, int offset, int head, const float* key,
                              const float* value) {
  const int dim = layer.head_dim;
  const float key_scale = int8_scale(key, dim), value_scale = int8_scale(value, dim);
  layer.key_scales[layer.scales(block, head) + offset] = key_scale;
  layer.value_scales[layer.scales(block, head) + offset] = value_scale;
  int8_t* keys = static_cast<int8_t*>(layer.keys) + layer.block(block, head) + offset;
  int8_t* values = static_cast<int8_t*>(layer.values) + layer.block(block, head) + int64_t{offset} * dim;
  for (int d = 0; d < dim; ++d) {
    keys[int64_t{d} * layer.block_size] = to_int8(key[d], key_scale);
    values[d] = to_int8(value[d], value_scale);
  }
}

// Stores token `token` where the slot mapping says; a slot of -1 is skipped. `row` has room for 2 * head_dim.
inline void write_token(const Layer& layer, const Step& step, int64_t token, const Rows& k, const Rows& v, float* row) {
  const int64_t slot = step.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / layer.block_size;
  const int offset = static_cast<int>(slot % layer.block_size), dim = layer.head_dim;
  for (int head = 0; head < layer.num_kv_heads; ++head) {
    load_row(row, k.data, token * k.stride + int64_t{head} * dim, dim, k.kind);
    load_row(row + dim, v.data, token * v.stride + int64_t{head} * dim, dim, v.kind);
    switch (layer.kind) {
      case FLOAT32: write_row<float>(layer, block, offset, head, row, row + dim); break;
      case FLOAT16: write_row<Half>(layer, block, offset, head, row, row + dim); break;
      case BFLOAT16: write_row<BFloat16>(layer, block, offset, head, row, row + dim); break;
      case FLOAT8: write_row<Float8>(layer, block, offset, head, row, row + dim); break;
      default: write_row<int8_t>(layer, block, offset, head, row, row + dim);
    }
  }
}

}  // namespace tessera
