// The inner loops of paged attention: scores of one run of keys, their softmax, and the weighted values.
//
// A row is one query of one head. Rows go through the loops in chunks of at most six, which share every key
// and value that is read; a chunk's sums stay in registers over all of a tile.
#pragma once

#include <type_traits>

#include "vectors.hpp"

namespace tessera {

constexpr int CHUNK = 6;   // rows whose accumulators fit sixteen registers, two vectors each
constexpr int TILE = 128;  // the most keys between two rescalings; every block size divides it

// Asks for `count` elements.
template <class T> TESSERA_INLINE void prefetch(const T* from, int count) {
  constexpr int LINE = 64 / static_cast<int>(sizeof(T));
  for (int i = 0; i < count; i += LINE) __builtin_prefetch(from + i);
}

// What is asked for while a block is scored: its values, and the keys of the block after it.
template <class T> struct Upcoming {
  const T *values, *keys;

  Upcoming after(int count) const { return {values + count, keys + count}; }
};

// scores[r][0 .. 8 W) = sum over d of queries[d][r] * keys[d][0 .. 8 W), rows of `scores` TILE apart.
//
// Blocks are scattered and the hardware's own prefetching stops at a page's end. Values are asked for here, a line
// for each line of keys. A block's float32 keys are a stream long enough for the hardware, which fetches it beside
// the values, while requests of ours would break it off; narrower keys are asked for too.
template <class T, int R, int W>
void score(float* scores, const float* queries, const T* keys, Upcoming<T> upcoming, int stride, int head_dim) {
  constexpr int CHAINS = R * W < 8 ? 2 : 1;  // eight sums at least hide what a multiplication takes
  Floats sums[CHAINS][R][W];
  for (auto& chain : sums)
    for (auto& row : chain)
      for (Floats& sum : row) sum = Floats{};
  for (int d = 0; d < head_dim; d += CHAINS)
    for (int chain = 0; chain < CHAINS; ++chain, keys += stride, queries += R) {
      Floats key[W];
      prefetch(upcoming.values, W * LANES);
      if constexpr (sizeof(T) < sizeof(float)) prefetch(upcoming.keys, W * LANES);
      upcoming = upcoming.after(stride);
      for (int w = 0; w < W; ++w) key[w] = load(keys + w * LANES);
      for (int r = 0; r < R; ++r)
        for (int w = 0; w < W; ++w) sums[chain][r][w] += queries[r] * key[w];
    }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) {
      if constexpr (CHAINS == 2) sums[0][r][w] += sums[1][r][w];
      store(scores + r * TILE + w * LANES, sums[0][r][w]);
    }
}

// All keys of one block. `stride` is the block size: keys are stored [head_dim, block_size].
template <class T, int R>
void score_block(float* scores, const float* queries, const T* keys, const Upcoming<T>& upcoming, int stride,
                 int head_dim) {
  int at = 0;
  if constexpr (R <= 3)
    for (; at + 4 * LANES <= stride; at += 4 * LANES)
      score<T, R, 4>(scores + at, queries, keys + at, upcoming.after(at), stride, head_dim);
  for (; at + 2 * LANES <= stride; at += 2 * LANES)
    score<T, R, 2>(scores + at, queries, keys + at, upcoming.after(at), stride, head_dim);
  for (; at < stride; at += LANES)
    score<T, R, 1>(scores + at, queries, keys + at, upcoming.after(at), stride, head_dim);
}

// Consecutive values of one block.
template <class T> struct Run {
  const T* values;  // [count, head_dim]
  int count;
  int at;  // place of the first one in the tile
};

// sums[r][0 .. 8 C) += sum over keys of weights[r][key] * values[key][0 .. 8 C).
template <class T, int R, int C>
void weigh(float* sums, const float* weights, const Run<T>* runs, int num_runs, int head_dim, int column) {
  Floats total[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) total[r][c] = load(sums + r * head_dim + column + c * LANES);
  for (int i = 0; i < num_runs; ++i) {
    const T* values = runs[i].values + column;
    const float* weight = weights + runs[i].at;
    for (int t = 0; t < runs[i].count; ++t, values += head_dim, ++weight) {
      if constexpr (R > 3) {  // whichever is fewer stays in registers: the values, or the weights
        Floats value[C];
        for (int c = 0; c < C; ++c) value[c] = load(values + c * LANES);
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) total[r][c] += weight[r * TILE] * value[c];
      } else {
        for (int c = 0; c < C; ++c) {
          const Floats value = load(values + c * LANES);
          for (int r = 0; r < R; ++r) total[r][c] += weight[r * TILE] * value;
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + r * head_dim + column + c * LANES, total[r][c]);
}

template <class T, int R>
void weigh_runs(float* sums, const float* weights, const Run<T>* runs, int num_runs, int head_dim) {
  int column = 0;
  if constexpr (R <= 3)
    for (; column + 4 * LANES <= head_dim; column += 4 * LANES)
      weigh<T, R, 4>(sums, weights, runs, num_runs, head_dim, column);
  for (; column + 2 * LANES <= head_dim; column += 2 * LANES)
    weigh<T, R, 2>(sums, weights, runs, num_runs, head_dim, column);
  for (; column < head_dim; column += LANES) weigh<T, R, 1>(sums, weights, runs, num_runs, head_dim, column);
}

// Calls f with `rows` as a compile-time constant.
template <class F> TESSERA_INLINE void with_rows(int rows, F&& f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    default: return f(std::integral_constant<int, CHUNK>());
  }
}

// Running softmax of one row (Milakov and Gimelshein, arXiv 1805.02867), in powers of two.
struct Softmax {
  float top;  // largest score so far, times log2(e)
  float sum;  // of 2^(score - top)
};

// Turns a row's scores into weights. Only keys [first, last) of the tile's [begin, end) are seen; the weights of
// the others become exactly 0, whatever their scores are. Returns the factor for the row's earlier sums.
//
// `key_scales` and `value_scales` are those of the tile's keys, or null; `soft_cap` is in units of log2(e), 0 for
// none. begin and end are multiples of LANES.
inline float weights_of(float* scores, Softmax& state, int begin, int end, int first, int last,
                        const float* key_scales, const float* value_scales, float soft_cap) {
  if (first >= last) {
    for (int t = begin; t < end; t += LANES) store(scores + t, Floats{});
    return 1.f;
  }
  if (key_scales)
    for (int t = begin; t < end; t += LANES) store(scores + t, load(scores + t) * load(key_scales + t));
  if (soft_cap != 0.f)
    for (int t = begin; t < end; t += LANES) store(scores + t, tanh(load(scores + t)) * soft_cap);
  for (int t = begin; t < first; ++t) scores[t] = -INFINITY;
  for (int t = last; t < end; ++t) scores[t] = -INFINITY;

  Floats widest = load(scores + begin);
  for (int t = begin + LANES; t < end; t += LANES) widest = larger(widest, load(scores + t));
  const float before = state.top;
  const float top = std::fmax(before, largest_lane(widest));
  Floats total = {};
  for (int t = begin; t < end; t += LANES) {
    const Floats weight = exp2(load(scores + t) - top);
    total += weight;
    store(scores + t, value_scales ? weight * load(value_scales + t) : weight);
  }
  const float kept = top == before ? 1.f : std::exp2(before - top);
  state.top = top;
  state.sum = state.sum * kept + sum_lanes(total);
  return kept;
}

}  // namespace tessera
