// The inner loops of paged attention: scores of one run of keys, their softmax, and the weighted values.
//
// A row is one query of one head. Rows go through the loops in chunks of at most six, which share every key
// and value that is read; a chunk's sums stay in registers over all of a tile.
#pragma once

#include <type_traits>

#include "vectors.hpp"

namespace tessera {

constexpr int CHUNK = 6;   // rows of one pass
constexpr int TILE = 128;  // the most keys between two rescalings; every block size divides it

// Vectors of a row's sums, so that all sums of a pass stay in registers: 12 of 16, or 24 of AVX-512's 32.
constexpr int vectors_of(int rows) { return rows <= 3 || MOST_LANES > LANES ? 4 : 2; }

template <class T> constexpr int LINE = 64 / sizeof(T);  // elements of a cache line

// Keys of one tile, a vector of N at a time; blocks are [head_dim, block_size].
template <class T> struct KeyRun {
  const T* keys;           // what `vectors` count from
  const int64_t* vectors;  // where each vector begins, in elements
  const T* ahead;          // what `shares` count from: the values of the same blocks
  const int64_t* shares;   // where the N * head_dim elements begin that are asked for along with each vector
};

// scores[r][0 .. N W) = sum over d of queries[d][r] * keys[d][0 .. N W), rows of `scores` TILE apart.
//
// Blocks are scattered and the hardware's own prefetching stops at a page's end, so what comes next is asked for
// here, if AHEAD: a line for each line that is read.
template <class T, int N, int R, int W, bool AHEAD>
void score(float* scores, const float* queries, const KeyRun<T>& run, int stride, int head_dim) {
  constexpr int CHAINS = R * W < 8 ? 2 : 1;  // eight sums at least hide what a multiplication takes
  FloatsOf<N> sums[CHAINS][R][W];
  for (auto& chain : sums)
    for (auto& row : chain)
      for (auto& sum : row) sum = FloatsOf<N>{};
  const T *keys[W], *ahead[W];
  for (int w = 0; w < W; ++w) {
    keys[w] = run.keys + run.vectors[w];
    ahead[w] = run.ahead + run.shares[w];
  }
  for (int64_t d = 0, at = 0; d < head_dim; d += CHAINS)
    for (int chain = 0; chain < CHAINS; ++chain, at += stride, queries += R) {
      if (AHEAD && (d + chain) * N % LINE<T> == 0)
        for (int w = 0; w < W; ++w) __builtin_prefetch(ahead[w] + (d + chain) * N);
      FloatsOf<N> key[W];
      for (int w = 0; w < W; ++w) key[w] = load<N>(keys[w] + at);
      for (int r = 0; r < R; ++r)
        for (int w = 0; w < W; ++w) sums[chain][r][w] += queries[r] * key[w];
    }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) {
      if constexpr (CHAINS == 2) sums[0][r][w] += sums[1][r][w];
      store(scores + r * TILE + w * N, sums[0][r][w]);
    }
}

// `count` vectors of N keys.
template <class T, int N, int R, bool AHEAD>
void score_run(float* scores, const float* queries, KeyRun<T> run, int count, int stride, int head_dim) {
  const auto pass = [&](auto vectors) {
    constexpr int W = decltype(vectors)::value;
    for (; count >= W; count -= W, run.vectors += W, run.shares += W, scores += W * N)
      score<T, N, R, W, AHEAD>(scores, queries, run, stride, head_dim);
  };
  pass(std::integral_constant<int, vectors_of(R)>());
  if constexpr (vectors_of(R) == 4) pass(std::integral_constant<int, 2>());
  pass(std::integral_constant<int, 1>());
}

// Consecutive values of one block.
template <class T> struct Run {
  const T* values;  // [count, head_dim]
  const T* ahead;   // as many elements that are asked for meanwhile
  int count;
  int at;  // place of the first one in the tile
};

// sums[r][0 .. N C) += sum over keys of weights[r][key] * values[key][0 .. N C).
template <class T, int N, int R, int C, bool AHEAD>
void weigh(float* sums, const float* weights, const Run<T>* runs, int num_runs, int head_dim, int column) {
  FloatsOf<N> total[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) total[r][c] = load<N>(sums + r * head_dim + column + c * N);
  for (int i = 0; i < num_runs; ++i) {
    const T *values = runs[i].values + column, *ahead = runs[i].ahead + column;
    const float* weight = weights + runs[i].at;
    for (int t = 0; t < runs[i].count; ++t, values += head_dim, ++weight) {
      if constexpr (AHEAD) {
        for (int c = 0; c < C * N; c += LINE<T>) __builtin_prefetch(ahead + c);
        ahead += head_dim;
      }
      if constexpr (R > 3) {  // whichever is fewer stays in registers: the values, or the weights
        FloatsOf<N> value[C];
        for (int c = 0; c < C; ++c) value[c] = load<N>(values + c * N);
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) total[r][c] += weight[r * TILE] * value[c];
      } else {
        for (int c = 0; c < C; ++c) {
          const FloatsOf<N> value = load<N>(values + c * N);
          for (int r = 0; r < R; ++r) total[r][c] += weight[r * TILE] * value;
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + r * head_dim + column + c * N, total[r][c]);
}

template <class T, int R, bool AHEAD>
void weigh_runs(float* sums, const float* weights, const Run<T>* runs, int num_runs, int head_dim) {
  int column = 0;
  const auto pass = [&](auto lanes, auto vectors) {
    constexpr int N = decltype(lanes)::value, C = decltype(vectors)::value;
    for (; column + C * N <= head_dim; column += C * N)
      weigh<T, N, R, C, AHEAD>(sums, weights, runs, num_runs, head_dim, column);
  };
  constexpr std::integral_constant<int, MOST_LANES> most;
  pass(most, std::integral_constant<int, vectors_of(R)>());
  if constexpr (vectors_of(R) == 4) pass(most, std::integral_constant<int, 2>());
  pass(most, std::integral_constant<int, 1>());
  if constexpr (MOST_LANES > LANES) pass(std::integral_constant<int, LANES>(), std::integral_constant<int, 1>());
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
// none. begin and end are multiples of N.
template <int N>
inline float weights_of(float* scores, Softmax& state, int begin, int end, int first, int last,
                        const float* key_scales, const float* value_scales, float soft_cap) {
  if (first >= last) {
    for (int t = begin; t < end; t += N) store(scores + t, FloatsOf<N>{});
    return 1.f;
  }
  if (key_scales)
    for (int t = begin; t < end; t += N) store(scores + t, load<N>(scores + t) * load<N>(key_scales + t));
  if (soft_cap != 0.f)
    for (int t = begin; t < end; t += N) store(scores + t, tanh(load<N>(scores + t)) * soft_cap);
  for (int t = begin; t < first; ++t) scores[t] = -INFINITY;
  for (int t = last; t < end; ++t) scores[t] = -INFINITY;

  FloatsOf<N> widest = load<N>(scores + begin);
  for (int t = begin + N; t < end; t += N) widest = larger(widest, load<N>(scores + t));
  const float before = state.top;
  const float top = std::fmax(before, largest_lane(widest));
  FloatsOf<N> total = {};
  for (int t = begin; t < end; t += N) {
    const FloatsOf<N> weight = exp2(load<N>(scores + t) - top);
    total += weight;
    store(scores + t, value_scales ? weight * load<N>(value_scales + t) : weight);
  }
  const float kept = top == before ? 1.f : std::exp2(before - top);
  state.top = top;
  state.sum = state.sum * kept + sum_lanes(total);
  return kept;
}

}  // namespace tessera
