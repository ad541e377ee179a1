// One task of paged attention: some rows of one sequence and key head over one range of its keys.
#pragma once

#include <algorithm>

#include "attention_tile.hpp"
#include "kv_cache.hpp"
#include "scratch.hpp"

namespace tessera {

constexpr int MAX_ROWS = 48;    // rows of one task: eight chunks
constexpr int FEW_TILE = 64;    // keys between two rescalings of few rows, or a block if that is more
constexpr int DIRECT_ROWS = 12;  // up to here keys and values are converted as they are read, else a tile at once
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

// Where the blocks of a tile are, and in them each vector of N keys and its share of the block; in elements.
template <int N> struct TileBlocks {
  int64_t blocks[TILE / LANES], vectors[TILE / N], shares[TILE / N];

  void set(const Layer& layer, int place, int64_t block) {
    const int each = layer.block_size / N;
    blocks[place] = block;
    for (int v = 0; v < each; ++v) {
      vectors[place * each + v] = block + v * N;
      shares[place * each + v] = block + v * N * layer.head_dim;
    }
  }
  // The tile of `size` keys that begins at `start`, as far as the task goes.
  void find(const Layer& layer, const Step& step, const Task& task, int start, int size) {
    const int32_t* table = step.block_tables + int64_t{task.seq} * step.table_width;
    const int first = std::max(start, task.begin), last = std::min(start + size, task.end);
    for (int at = first / layer.block_size; at * layer.block_size < last; ++at)
      set(layer, at - start / layer.block_size, layer.block(table[at], task.kv_head));
  }
};

// Keys [first, last) of the sequence, in the tile that begins at `start`.
struct KeyTile {
  int start, first, last;

  int begin(int block_size) const { return (first - start) / block_size * block_size; }
  int end(int block_size) const { return (last - start + block_size - 1) / block_size * block_size; }
};

// The keys and values of a tile: in the cache, or converted.
template <class T, int N> struct TileData {
  const T *keys, *values;
  const TileBlocks<N>* blocks;
  const TileBlocks<N>* next;  // of the tile after this one; null where nothing is asked for ahead
};

// Scores of all rows, four vectors of keys after the other. The first chunk, which is the first to read a key, asks
// for its value.
template <class T, int N>
void score_tile(const RowRange& rows, const TaskMemory& memory, const TileData<T, N>& data, const KeyTile& tile) {
  const int size = rows.layer.block_size, dim = rows.layer.head_dim, end = tile.end(size);
  for (int from = tile.begin(size); from < end; from += 4 * N)
    for (int chunk = 0; chunk < rows.chunks(); ++chunk) {
      const int start = rows.chunk_start(chunk), next = rows.chunk_start(chunk + 1);
      // The vectors in which some row of the chunk sees a key.
      const int first = std::max(from, (rows.floor(start) - tile.start) / N * N);
      const int last = std::min({end, from + 4 * N, rows.limit(next - 1) - tile.start});
      if (first >= last) continue;
      const KeyRun<T> run{data.keys, data.blocks->vectors + first / N, data.values, data.blocks->shares + first / N};
      const int count = (last - first + N - 1) / N;
      float* scores = memory.scores + start * TILE + first;
      const float* queries = memory.queries + start * dim;
      with_rows(next - start, [&](auto r) {
        if (data.next && chunk == 0) score_run<T, N, r, true>(scores, queries, run, count, size, dim);
        else score_run<T, N, r, false>(scores, queries, run, count, size, dim);
      });
    }
}

// Adds the weighted values to the sums. The first chunk asks for the keys of the tile to come.
template <class T, int N>
void weigh_tile(const RowRange& rows, const TaskMemory& memory, const TileData<T, N>& data, const KeyTile& tile) {
  const int size = rows.layer.block_size, dim = rows.layer.head_dim;
  for (int chunk = 0; chunk < rows.chunks(); ++chunk) {
    const int start = rows.chunk_start(chunk), next = rows.chunk_start(chunk + 1);
    const bool ahead = data.next && chunk == 0;
    // Exactly the keys that some row of the chunk sees: what lies in the slots around them may be NaN.
    const int first = std::max(tile.first, rows.floor(start)) - tile.start;
    const int last = std::min(tile.last, rows.limit(next - 1)) - tile.start;
    Run<T> runs[TILE / LANES];
    int num_runs = 0;
    for (int key = first; key < last;) {
      const int place = key / size, stop = std::min(last, (place + 1) * size);
      const int64_t within = int64_t{key % size} * dim;
      runs[num_runs++] = {data.values + data.blocks->blocks[place] + within,
                          ahead ? data.keys + data.next->blocks[place] + within : nullptr, stop - key, key};
      key = stop;
    }
    with_rows(next - start, [&](auto r) {
      float* sums = memory.sums + start * dim;
      const float* weights = memory.scores + start * TILE;
      if (ahead) weigh_runs<T, r, true>(sums, weights, runs, num_runs, dim);
      else weigh_runs<T, r, false>(sums, weights, runs, num_runs, dim);
    });
  }
}

// Fills memory.sums and `states` for the rows of the task, N keys at a time. `following` is the thread's next task,
// whose first keys are asked for at the end of this one; it may be null.
template <class T, int N>
void attend_keys(const RowRange& rows, const Step& step, const Task* following, const TaskMemory& memory,
                 Softmax* states) {
  const Layer& layer = rows.layer;
  const Task& task = rows.task;
  const int size = layer.block_size, dim = layer.head_dim, block_elements = size * dim;
  const bool direct = std::is_same_v<T, float> || task.num_rows <= DIRECT_ROWS;
  const int tile_size = task.num_rows <= DIRECT_ROWS ? std::max(FEW_TILE, size) : TILE;
  const float soft_cap = layer.soft_cap * LOG2_E;
  const T *keys = static_cast<const T*>(layer.keys), *values = static_cast<const T*>(layer.values);
  const int32_t* table = step.block_tables + int64_t{task.seq} * step.table_width;
  float scales[2][TILE];
  const bool quantised = layer.kind == INT8;
  TileBlocks<N> blocks, next = {}, converted;
  next.find(layer, step, task, task.begin / tile_size * tile_size, tile_size);

  for (int start = task.begin / tile_size * tile_size; start < task.end; start += tile_size) {
    const KeyTile tile{start, std::max(start, task.begin), std::min(start + tile_size, task.end)};
    const int begin = tile.begin(size), end = tile.end(size);
    blocks = next;
    if (tile.last < task.end) next.find(layer, step, task, start + tile_size, tile_size);
    else if (following) next.find(layer, step, *following, following->begin / tile_size * tile_size, tile_size);
    for (int place = begin / size; place < end / size; ++place) {
      if (!direct) {
        converted.set(layer, place, int64_t{place} * block_elements);
        load_row(memory.keys + converted.blocks[place], keys + blocks.blocks[place], block_elements);
        load_row(memory.values + converted.blocks[place], values + blocks.blocks[place], block_elements);
      }
      if (quantised) {
        const int64_t from = layer.scales(table[start / size + place], task.kv_head);
        std::memcpy(scales[0] + place * size, layer.key_scales + from, size * sizeof(float));
        std::memcpy(scales[1] + place * size, layer.value_scales + from, size * sizeof(float));
      }
    }
    const TileData<T, N> stored{keys, values, &blocks, &next};
    const TileData<float, N> copied{memory.keys, memory.values, &converted, nullptr};
    if (direct) score_tile(rows, memory, stored, tile);
    else score_tile(rows, memory, copied, tile);
    for (int row = 0; row < task.num_rows; ++row) {
      const int seen = std::max(tile.first, rows.floor(row)) - start;
      const int stop = std::min(tile.last, rows.limit(row)) - start;
      const float kept = weights_of<N>(memory.scores + row * TILE, states[row], begin, end, seen, stop,
                                       quantised ? scales[0] : nullptr, quantised ? scales[1] : nullptr, soft_cap);
      float* sums = memory.sums + row * dim;
      if (kept != 1.f)
        for (int d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * kept);
    }
    if (direct) weigh_tile(rows, memory, stored, tile);
    else weigh_tile(rows, memory, copied, tile);
  }
}

}  // namespace tessera
