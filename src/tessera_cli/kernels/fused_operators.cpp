// Elementwise steps of a decoder layer, each one pass over its rows. models/operators.py has the plain versions.
#include "scratch.hpp"
#include "vectors.hpp"

namespace tessera {
namespace {

// Rows are worth a second thread from about this many elements on.
constexpr int64_t ELEMENTS_PER_THREAD = 8192;

int team(int64_t elements, int32_t threads) {
  const int64_t wanted = elements / ELEMENTS_PER_THREAD;
  return static_cast<int>(wanted < 1 ? 1 : wanted < threads ? wanted : threads);
}

// x / (1 + exp(-x))
TESSERA_INLINE Floats silu(Floats x) {
  const Floats power = x * -1.44269504f;
  return x / (1.f + exp2(power > 127.f ? Floats{} + 127.f : power));
}

// A row of a tensor as floats: the row itself where it is float32, else a copy in `scratch`.
const float* row_of(const void* from, int64_t at, int width, Kind type, float* scratch) {
  if (type == FLOAT32) return static_cast<const float*>(from) + at;
  load_row(scratch, from, at, width, type);
  return scratch;
}

// Where a row of a tensor is computed: in place where it is float32, else in `scratch`, to be stored afterwards.
float* target_of(void* to, int64_t at, Kind type, float* scratch) {
  return type == FLOAT32 ? static_cast<float*>(to) + at : scratch;
}

}  // namespace
}  // namespace tessera

using namespace tessera;

extern "C" {

// residual += x, where x is not null; out = residual / sqrt(mean(residual^2) + eps) * weight. Rows of `width`, a
// multiple of 8. The sum is rounded to the dtype before the norm is taken, as it is what later layers see.
void tessera_add_rms_norm(void* residual, const void* x, const void* weight, void* out, int64_t rows, int32_t width,
                          float eps, int32_t kind, int32_t threads) {
  const Kind type = static_cast<Kind>(kind);
#pragma omp parallel num_threads(team(rows * width, threads))
  {
    thread_local Scratch scratch;
    float* floats = scratch.floats(size_t(3) * width);
    const float* scale = row_of(weight, 0, width, type, floats + 2 * width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * width;
      const float* sum = row_of(residual, at, width, type, floats);
      if (x) {
        const float* added = row_of(x, at, width, type, floats + width);
        float* total = target_of(residual, at, type, floats);
        for (int i = 0; i < width; i += LANES) store(total + i, load(sum + i) + load(added + i));
        if (type != FLOAT32) {
          store_row(residual, at, total, width, type);
          load_row(floats, residual, at, width, type);
        }
        sum = total;
      }
      Floats squares = {};
      for (int i = 0; i < width; i += LANES) squares += load(sum + i) * load(sum + i);
      const float factor = 1.f / std::sqrt(sum_lanes(squares) / width + eps);
      float* normed = target_of(out, at, type, floats + width);
      for (int i = 0; i < width; i += LANES) store(normed + i, load(sum + i) * (factor * load(scale + i)));
      if (type != FLOAT32) store_row(out, at, normed, width, type);
    }
  }
}

// Rotates the first `heads` heads of each token in place: x * cos + (x rolled by half a head) * sin. A token starts
// at element t * stride; cos and sin are float32 [num_tokens, head_dim], the sine with the sign of the first half.
void tessera_rotate(void* packed, const float* cos, const float* sin, int64_t num_tokens, int64_t stride, int32_t heads,
                    int32_t head_dim, int32_t kind, int32_t threads) {
  const Kind type = static_cast<Kind>(kind);
  const int half = head_dim / 2;
#pragma omp parallel num_threads(team(num_tokens * heads * head_dim, threads))
  {
    thread_local Scratch scratch;
    float *head = scratch.floats(size_t(2) * head_dim), *rotated = head + head_dim;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < num_tokens; ++token) {
      const float *c = cos + token * head_dim, *s = sin + token * head_dim;
      for (int h = 0; h < heads; ++h) {
        const int64_t at = token * stride + int64_t{h} * head_dim;
        load_row(head, packed, at, head_dim, type);
        for (int i = 0; i < half; ++i) rotated[i] = head[i] * c[i] + head[half + i] * s[i];
        for (int i = half; i < head_dim; ++i) rotated[i] = head[i] * c[i] + head[i - half] * s[i];
        store_row(packed, at, rotated, head_dim, type);
      }
    }
  }
}

// out [rows, width] = silu(gate) * up, of gate_up [rows, 2 width] with the gate first; width a multiple of 8.
void tessera_silu_and_mul(const void* gate_up, void* out, int64_t rows, int32_t width, int32_t kind, int32_t threads) {
  const Kind type = static_cast<Kind>(kind);
#pragma omp parallel num_threads(team(rows * width, threads))
  {
    thread_local Scratch scratch;
    float* floats = scratch.floats(size_t(3) * width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const float* gate = row_of(gate_up, row * 2 * width, 2 * width, type, floats);
      float* product = target_of(out, row * width, type, floats + 2 * width);
      for (int i = 0; i < width; i += LANES) store(product + i, silu(load(gate + i)) * load(gate + width + i));
      if (type != FLOAT32) store_row(out, row * width, product, width, type);
    }
  }
}

}  // extern "C"
