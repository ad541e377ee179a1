// One task of paged attention: some rows of one sequence and key head over one range of its keys.
#pragma once

#include <algorithm>

#include "attention_tile.hpp"
#include "kv_cache.hpp"
#include "scratch.hpp"

namespace tessera {

constexpr int MAX_ROWS = 48;    // rows of one task: eight chunks
constexpr int FEW_TILE = 64;    // the fewest keys between two rescalings of few rows
constexpr int DIRECT_ROWS = 12;  // up to here keys and values are converted as they are read, else a block at once
constexpr float LOG2_E = 1.44269504f;

struct Task {
  int32_t seq;
  int32_t kv_head;
  int32_t first_row;  // row = query token * group + head of the group
  int32_t num_rows;
  int32_t begin;  // keys, positions in the sequence
  int32_t end;
  int64_t part;  // where its unfinished sums go, in floats; -1: it sees all keys and writes the output
};

// The rows of a task: which of its keys each one sees, and how they are cut into chunks.
struct RowRange {
  const Layer& layer;
  const Task& task;
  int group;
  int context;  // tokens of the sequence before this step's first

  int chunks() const { return (task.num_rows + CHUNK - 1) / CHUNK; }
  int chunk_start(int chunk) const { return task.num_rows * chunk / chunks(); }
  int limit(int row) const { return context + (task.first_row + row) / group + 1; }
  int floor(int row) const { return layer.window ? std::max(0, limit(row) - layer.window) : 0; }
};

// Memory of one task, in floats: queries, sums, scores, a tile's keys and values.
struct TaskMemory {
  float *queries, *sums, *scores, *keys, *values;

  static size_t size(int head_dim) {
    return size_t(2) * MAX_ROWS * head_dim + MAX_ROWS * TILE + size_t(2) * TILE * head_dim;
  }
  TaskMemory(float* data, int head_dim) : queries(data) {
    sums = queries + MAX_ROWS * head_dim;
    scores = sums + MAX_ROWS * head_dim;
    keys = scores + MAX_ROWS * TILE;
    values = keys + TILE * head_dim;
  }
};

// Queries times scale, each chunk as [head_dim, rows of the chunk].
inline void load_queries(const RowRange& rows, const Rows& q, int64_t first_token, float* queries, float* row) {
  const Layer& layer = rows.layer;
  const int dim = layer.head_dim;
  // A capped score is divided by its cap before the tanh, a plain one brought to powers of two.
  const float factor = layer.scale * (layer.soft_cap != 0.f ? 1.f / layer.soft_cap : LOG2_E);
  for (int chunk = 0; chunk < rows.chunks(); ++chunk) {
    const int start = rows.chunk_start(chunk), count = rows.chunk_start(chunk + 1) - start;
    for (int r = 0; r < count; ++r) {
      const int flat = rows.task.first_row + start + r;
      const int64_t head = int64_t{rows.task.kv_head} * rows.group + flat % rows.group;
      load_row(row, q.data, (first_token + flat / rows.group) * q.stride + head * dim, dim, q.kind);
      for (int d = 0; d < dim; ++d) queries[start * dim + d * count + r] = row[d] * factor;
    }
  }
}

// Adds the tile's weighted values to the sums; `blocks` are where each block's values are.
template <class T>
void weigh_tile(const RowRange& rows, const TaskMemory& memory, const T* const* blocks, int tile_start, int first,
                int last) {
  const int size = rows.layer.block_size, dim = rows.layer.head_dim;
  for (int chunk = 0; chunk < rows.chunks(); ++chunk) {
    const int start = rows.chunk_start(chunk), next = rows.chunk_start(chunk + 1);
    // Exactly the keys that some row of the chunk sees: what lies in the slots around them may be NaN.
    const int begin = std::max(first, rows.floor(start)), end = std::min(last, rows.limit(next - 1));
    Run<T> runs[TILE / LANES];
    int num_runs = 0;
    for (int key = begin; key < end;) {
      const int stop = std::min(end, (key / size + 1) * size);
      runs[num_runs++] = {blocks[(key - tile_start) / size] + int64_t{key % size} * dim, stop - key, key - tile_start};
      key = stop;
    }
    with_rows(next - start, [&](auto count) {
      weigh_runs<T, count>(memory.sums + start * dim, memory.scores + start * TILE, runs, num_runs, dim);
    });
  }
}

// Fills memory.sums and `states` for the rows of the task.
template <class T>
void attend_keys(const RowRange& rows, const int32_t* table, const TaskMemory& memory, Softmax* states) {
  const Layer& layer = rows.layer;
  const Task& task = rows.task;
  const int size = layer.block_size, dim = layer.head_dim, block_elements = size * dim;
  const bool direct = std::is_same_v<T, float> || task.num_rows <= DIRECT_ROWS;
  const bool few = task.num_rows <= DIRECT_ROWS;
  const int tile = few ? std::max(FEW_TILE, size) : TILE;
  const float soft_cap = layer.soft_cap * LOG2_E;
  const T *all_keys = static_cast<const T*>(layer.keys), *all_values = static_cast<const T*>(layer.values);
  float key_scales[TILE], value_scales[TILE];
  const T* blocks[TILE / LANES];
  const float* converted[TILE / LANES];

  for (int tile_start = task.begin / tile * tile; tile_start < task.end; tile_start += tile) {
    const int first = std::max(tile_start, task.begin), last = std::min(tile_start + tile, task.end);
    const int first_block = first / size, end_block = (last - 1) / size + 1;
    for (int index = first_block; index < end_block; ++index) {
      const int64_t base = layer.block(table[index], task.kv_head);
      const int at = index * size - tile_start, place = at / size;
      const T* keys = all_keys + base;
      blocks[place] = all_values + base;
      const bool another = (index + 1) * size < task.end;
      const Upcoming<T> upcoming{all_values + base,
                                 another ? all_keys + layer.block(table[index + 1], task.kv_head) : keys};
      if (!direct) {
        load_row(memory.keys, keys, block_elements);
        converted[place] = memory.values + at * dim;
        load_row(memory.values + at * dim, all_values + base, block_elements);
      }
      if (layer.kind == INT8) {
        const int64_t scales = layer.scales(table[index], task.kv_head);
        std::memcpy(key_scales + at, layer.key_scales + scales, size * sizeof(float));
        std::memcpy(value_scales + at, layer.value_scales + scales, size * sizeof(float));
      }
      for (int chunk = 0; chunk < rows.chunks(); ++chunk) {
        const int start = rows.chunk_start(chunk), next = rows.chunk_start(chunk + 1);
        if (rows.limit(next - 1) <= index * size || rows.floor(start) >= (index + 1) * size) continue;  // none is seen
        float* scores = memory.scores + start * TILE + at;
        const float* queries = memory.queries + start * dim;
        with_rows(next - start, [&](auto count) {
          if (direct) score_block<T, count>(scores, queries, keys, upcoming, size, dim);
          else score_block<float, count>(scores, queries, memory.keys, {memory.keys, memory.keys}, size, dim);
        });
      }
    }
    const int begin = first_block * size - tile_start, end = end_block * size - tile_start;
    for (int row = 0; row < task.num_rows; ++row) {
      const int seen = std::max(first, rows.floor(row)) - tile_start;
      const int stop = std::min(last, rows.limit(row)) - tile_start;
      const bool quantised = layer.kind == INT8;
      const float kept = weights_of(memory.scores + row * TILE, states[row], begin, end, seen, stop,
                                    quantised ? key_scales : nullptr, quantised ? value_scales : nullptr, soft_cap);
      float* sums = memory.sums + row * dim;
      if (kept != 1.f)
        for (int d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * kept);
    }
    if (direct) weigh_tile(rows, memory, blocks, tile_start, first, last);
    else weigh_tile(rows, memory, converted, tile_start, first, last);
  }
}

}  // namespace tessera
