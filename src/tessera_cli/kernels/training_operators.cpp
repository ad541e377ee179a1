// Gradients of a decoder layer's elementwise steps, in float32. models/operators.py has the steps, in plain torch.
//
// A sum over rows is taken in blocks of ROWS_PER_BLOCK rows, then over the blocks, in order: the same bits on any
// number of threads.
#include "vectors.hpp"

namespace tessera {
namespace {

constexpr int64_t ROWS_PER_BLOCK = 32;
// Rows are worth a second thread from about this many elements on.
constexpr int64_t ELEMENTS_PER_THREAD = 8192;

int team(int64_t elements, int32_t threads) {
  const int64_t wanted = elements / ELEMENTS_PER_THREAD;
  return static_cast<int>(wanted < 1 ? 1 : wanted < threads ? wanted : threads);
}

// 1 / (1 + exp(-x))
TESSERA_INLINE Floats sigmoid(Floats x) {
  const Floats power = x * -1.44269504f;
  return 1.f / (1.f + exp2(power > 127.f ? Floats{} + 127.f : power));
}

// The gradient of y = x f w, f = 1 / sqrt(mean(x^2) + eps), in x: f (g w - x f^2 mean(g w x)); and g x f, that in w,
// added to `sums`, where there are any.
void norm_row_backward(const float* x, const float* weight, const float* grad, const float* passed, float* out,
                       float* sums, int32_t width, float eps) {
  Floats squares = {}, products = {};
  for (int i = 0; i < width; i += LANES) {
    const Floats value = load(x + i);
    squares += value * value;
    products += load(grad + i) * load(weight + i) * value;
  }
  const float factor = 1.f / std::sqrt(sum_lanes(squares) / width + eps);
  const float along = factor * factor * (sum_lanes(products) / width);
  for (int i = 0; i < width; i += LANES) {
    const Floats value = load(x + i), slope = load(grad + i);
    const Floats result = factor * (slope * load(weight + i) - value * along);
    store(out + i, passed ? load(passed + i) + result : result);
    if (sums) store(sums + i, load(sums + i) + slope * (value * factor));
  }
}

}  // namespace
}  // namespace tessera

using namespace tessera;

extern "C" {

// Of `tessera_add_rms_norm`: `x` is the sum that was normed, `grad` the gradient of its norm and `passed`, where not
// null, one of the sum itself. `out` gets that of the sum, all [rows, width]; `weight_grad` [width], where not null,
// that of the weight, by way of `partial` [ceil(rows / 32), width]. Width is a multiple of 8.
void tessera_rms_norm_backward(const float* x, const float* weight, const float* grad, const float* passed, float* out,
                               float* partial, float* weight_grad, int64_t rows, int32_t width, float eps,
                               int32_t threads) {
  const int64_t blocks = (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
  for (int64_t block = 0; block < blocks; ++block) {
    float* sums = weight_grad ? partial + block * width : nullptr;
    if (sums) std::memset(sums, 0, sizeof(float) * width);
    const int64_t end = rows < (block + 1) * ROWS_PER_BLOCK ? rows : (block + 1) * ROWS_PER_BLOCK;
    for (int64_t at = block * ROWS_PER_BLOCK * width; at < end * width; at += width)
      norm_row_backward(x + at, weight, grad + at, passed ? passed + at : nullptr, out + at, sums, width, eps);
  }
  if (!weight_grad) return;
  std::memset(weight_grad, 0, sizeof(float) * width);
  for (int64_t block = 0; block < blocks; ++block)
    for (int i = 0; i < width; i += LANES)
      store(weight_grad + i, load(weight_grad + i) + load(partial + block * width + i));
}

// Of `tessera_silu_and_mul`, in gate_up [rows, 2 width]: grad up s (1 + gate (1 - s)) and grad gate s, s the sigmoid
// of the gate. `grad` is [rows, width], `out` like gate_up; width a multiple of 8.
void tessera_silu_and_mul_backward(const float* gate_up, const float* grad, float* out, int64_t rows, int32_t width,
                                   int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
  for (int64_t row = 0; row < rows; ++row) {
    const float *gates = gate_up + row * 2 * width, *ups = gates + width, *slopes = grad + row * width;
    float *gate_out = out + row * 2 * width, *up_out = gate_out + width;
    for (int i = 0; i < width; i += LANES) {
      const Floats gate = load(gates + i), share = sigmoid(gate), slope = load(slopes + i), silu = gate * share;
      store(gate_out + i, slope * load(ups + i) * (share + silu * (1.f - share)));
      store(up_out + i, slope * silu);
    }
  }
}

// out = in * cos + (in rolled by half a head) * sin * sign, for `heads` heads of each token. A token of `in` starts at
// element t * stride, one of `out` follows the one before it; cos and sin are [num_tokens, head_dim] as for
// `tessera_rotate`. With a sign of -1 it turns back, which is the gradient. Half a head is a multiple of 8.
void tessera_rotate_into(const float* in, float* out, const float* cos, const float* sin, int64_t num_tokens,
                         int64_t stride, int32_t heads, int32_t head_dim, float sign, int32_t threads) {
  const int half = head_dim / 2;
#pragma omp parallel for schedule(static) num_threads(team(num_tokens * heads * head_dim, threads))
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float *c = cos + token * head_dim, *s = sin + token * head_dim;
    for (int h = 0; h < heads; ++h) {
      const float* from = in + token * stride + int64_t{h} * head_dim;
      float* to = out + (token * heads + h) * head_dim;
      for (int i = 0; i < half; i += LANES) {
        const Floats low = load(from + i), high = load(from + half + i);
        store(to + i, low * load(c + i) + high * (sign * load(s + i)));
        store(to + half + i, high * load(c + half + i) + low * (sign * load(s + half + i)));
      }
    }
  }
}

}  // extern "C"
