// The results of a row's splits into one. Splits without keys have a sum of 0 and left their values unwritten.
#pragma once
#include "attention_tile.cuh"

// Grid (num_tokens * num_heads), HEAD_DIM threads; needs num_splits > 1.
template <class T, int HEAD_DIM>
__global__ void __launch_bounds__(HEAD_DIM) merge_splits(const AttentionArguments a) {
  const long long row = blockIdx.x;
  // A captured graph may have more tokens than this step.
  if (row >= static_cast<long long>(a.query_start_loc[a.num_seqs]) * a.num_kv_heads * a.group) return;
  const float2* parts = a.partial_softmax + row * a.num_splits;
  const float* values = a.partial_out + row * a.num_splits * HEAD_DIM + threadIdx.x;
  Softmax total;
  for (int split = 0; split < a.num_splits; ++split) total.top = fmaxf(total.top, parts[split].x);
  float value = 0.f;
  for (int split = 0; split < a.num_splits; ++split) {
    if (parts[split].y == 0.f) continue;
    const float weight = exp2f(parts[split].x - total.base());
    total.sum += weight * parts[split].y;
    value += weight * values[static_cast<long long>(split) * HEAD_DIM];
  }
  store(static_cast<T*>(a.out) + row * HEAD_DIM + threadIdx.x, value / total.sum);
}
