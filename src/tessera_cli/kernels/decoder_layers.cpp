// All layers of a decoder in one call. models/layers.py has the plain version; here are the same steps, and what is
// saved is the time between them, which at one token is as long as the steps themselves.
#include <algorithm>

#include "kv_cache.hpp"
#include "scratch.hpp"

using tessera::Layer;
using tessera::Step;

extern "C" {
void tessera_attend(const Layer* layer, const Step* step, const void* q, int64_t q_stride, const void* k,
                    int64_t k_stride, const void* v, int64_t v_stride, void* out, int32_t kind, int32_t threads);
void tessera_add_rms_norm(void* residual, const void* x, const void* weight, void* out, int64_t rows, int32_t width,
                          float eps, int32_t kind, int32_t threads);
void tessera_rotate(void* packed, const float* cos, const float* sin, int64_t num_tokens, int64_t stride, int32_t heads,
                    int32_t head_dim, int32_t kind, int32_t threads);
void tessera_silu_and_mul(const void* gate_up, void* out, int64_t rows, int32_t width, int32_t kind, int32_t threads);
void tessera_float32_linear(float* y, const float* x, const float* packed, int64_t tokens, int64_t outputs,
                            int64_t inputs, int32_t threads);
void tessera_int8_linear(float* y, const float* x, const int8_t* packed, const float* scales, float largest,
                         int64_t tokens, int64_t outputs, int64_t inputs, int32_t threads);
}

namespace tessera {
namespace {

constexpr int64_t MLP_TOKENS = 512;  // whose inner activations are held at a time

// A product with packed weights; laid out as `Linear` in cpu_library.py.
struct Linear {
  const void* packed;
  const float* scales;  // of int8 weights, else null
  const float* bias;    // or null
  int64_t outputs;
  int64_t inputs;
  float largest;         // see int8_linear.py

  void operator()(float* y, const float* x, int64_t tokens, int32_t threads) const {
    if (scales)
      tessera_int8_linear(y, x, static_cast<const int8_t*>(packed), scales, largest, tokens, outputs, inputs, threads);
    else
      tessera_float32_linear(y, x, static_cast<const float*>(packed), tokens, outputs, inputs, threads);
    if (!bias) return;
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens > 1)
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t i = 0; i < outputs; ++i) y[token * outputs + i] += bias[i];
  }
};

// Laid out as `DecoderLayer` in cpu_library.py.
struct DecoderLayer {
  const float* input_norm;
  const float* post_norm;
  Linear qkv;
  Linear o;
  Linear gate_up;
  Linear down;
  int32_t rotates;
};

}  // namespace
}  // namespace tessera

using namespace tessera;

extern "C" {

// x [tokens, hidden], float32, is overwritten by the sum of all residuals, and `out` by its norm. `cos` and `sin` are
// those of tessera_rotate. layers[i] attends over caches[i].
void tessera_decoder_layers(const DecoderLayer* layers, const Layer* caches, int32_t num_layers, const Step* step,
                            float* x, const float* cos, const float* sin, const float* norm, float eps, float* out,
                            int32_t threads) {
  thread_local Scratch scratch;
  const Layer& sizes = caches[0];
  const int64_t tokens = step->num_tokens, block = std::min(tokens, MLP_TOKENS);
  const int64_t hidden = layers[0].qkv.inputs, inner = layers[0].down.inputs, head_dim = sizes.head_dim;
  const int64_t q_width = sizes.num_heads * head_dim, k_width = sizes.num_kv_heads * head_dim;
  const int64_t qkv_width = q_width + 2 * k_width;
  float* qkv = scratch.floats(tokens * (qkv_width + q_width + hidden) + block * 3 * inner);
  float *attended = qkv + tokens * qkv_width, *update = attended + tokens * q_width;
  float *gate_up = update + tokens * hidden, *product = gate_up + block * 2 * inner;
  const int32_t width = static_cast<int32_t>(hidden), kind = FLOAT32;
  float* normed = out;

  for (int32_t i = 0; i < num_layers; ++i) {
    const DecoderLayer& layer = layers[i];
    tessera_add_rms_norm(x, i ? update : nullptr, layer.input_norm, normed, tokens, width, eps, kind, threads);
    layer.qkv(qkv, normed, tokens, threads);
    if (layer.rotates)
      tessera_rotate(qkv, cos, sin, tokens, qkv_width, sizes.num_heads + sizes.num_kv_heads, sizes.head_dim, kind,
                     threads);
    tessera_attend(caches + i, step, qkv, qkv_width, qkv + q_width, qkv_width, qkv + q_width + k_width, qkv_width,
                   attended, kind, threads);
    layer.o(update, attended, tokens, threads);
    tessera_add_rms_norm(x, update, layer.post_norm, normed, tokens, width, eps, kind, threads);
    for (int64_t first = 0; first < tokens; first += block) {
      const int64_t count = std::min(block, tokens - first);
      layer.gate_up(gate_up, normed + first * hidden, count, threads);
      tessera_silu_and_mul(gate_up, product, count, static_cast<int32_t>(inner), kind, threads);
      layer.down(update + first * hidden, product, count, threads);
    }
  }
  tessera_add_rms_norm(x, update, norm, out, tokens, width, eps, kind, threads);
}

}  // extern "C"
