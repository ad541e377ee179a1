// y = x Wᵀ in float32, with the weights in panels.
//
// An output is one chain of multiply-adds in the order of its inputs: it has the same bits in a batch of any size, at
// any place in it, on any number of threads.
#include <vector>

#include "linear.hpp"

namespace tessera {
namespace {

// Inputs that a panel of more than twice as many is read of at a time: it stays cached while a block of tokens passes.
constexpr int64_t PART = 1024;

// One tile, over `inputs` inputs; where it is not the first part of them, y holds the sums so far.
template <int R>
void float32_tile(float* y, int64_t outputs, int columns, bool continues, const float* x, int64_t stride,
                  const float* weights, int64_t inputs, Ahead<4 * COLUMNS> ahead) {
  WideFloats low[R], high[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    float row[COLUMNS] = {};
    const float* sums = y + r * outputs;
    if (!continues) sums = row;
    else if (columns < COLUMNS) sums = std::copy_n(sums, columns, row) - columns;
    low[r] = load_as<WideFloats>(sums), high[r] = load_as<WideFloats>(sums + WIDE);
  }
  Rows<R, float> rows(x, stride);
  for (int64_t k = 0; k < inputs; ++k, weights += COLUMNS) {
    const WideFloats w0 = load_as<WideFloats>(weights), w1 = load_as<WideFloats>(weights + WIDE);
    ahead.ask();
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const WideFloats activation = *rows[r] - WideFloats{};
      low[r] += activation * w0;
      high[r] += activation * w1;
    }
    rows.advance(1);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) store_columns(y + r * outputs, low[r], high[r], columns);
}

}  // namespace
}  // namespace tessera

using namespace tessera;

extern "C" {

// Outputs of a panel, of float32 and of int8 weights.
int32_t tessera_panel_columns() { return COLUMNS; }

// weights [outputs, inputs] -> panels [outputs / COLUMNS, inputs, COLUMNS], outputs rounded up and padded with zeros.
// `to` may be `weights`, if the outputs fill whole panels: a panel takes the place of the rows that it is made of.
void tessera_float32_pack(float* to, const float* weights, int64_t outputs, int64_t inputs, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> rows(COLUMNS * inputs);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < outputs; panel += COLUMNS) {
      std::copy_n(weights + panel * inputs, std::min<int64_t>(COLUMNS, outputs - panel) * inputs, rows.begin());
      if (outputs - panel < COLUMNS) std::fill(rows.begin() + (outputs - panel) * inputs, rows.end(), 0.f);
      for (int64_t k = 0; k < inputs; ++k)
        for (int64_t n = 0; n < COLUMNS; ++n) to[panel * inputs + k * COLUMNS + n] = rows[n * inputs + k];
    }
  }
}

// y [tokens, outputs] = x [tokens, inputs] times the packed weights.
void tessera_float32_linear(float* y, const float* x, const float* packed, int64_t tokens, int64_t outputs,
                            int64_t inputs, int32_t threads) {
  const int64_t parts = tokens > TILE_ROWS && inputs > 2 * PART ? ceil_div(inputs, PART) : 1;
  const int64_t bytes_of_input = COLUMNS * sizeof(float);
  Product product(tokens, outputs, parts, ceil_div(inputs, parts) * sizeof(float));
#pragma omp parallel num_threads(threads)
  product.deal([&](const Tile& tile, int64_t part) {
    const int64_t first = inputs * part / parts, count = inputs * (part + 1) / parts - first;
    const int64_t column = tile.panel * COLUMNS;
    const int columns = static_cast<int>(std::min<int64_t>(COLUMNS, outputs - column));
    const float* weights = packed + column * inputs + first * COLUMNS;
    const Ahead<4 * COLUMNS> ahead(tile, weights, count * bytes_of_input, inputs * bytes_of_input);
    with_rows(tile.rows, [&](auto rows) {
      float32_tile<rows>(y + tile.token * outputs + column, outputs, columns, part > 0,
                         x + tile.token * inputs + first, inputs, weights, count, ahead);
    });
  });
}

}  // extern "C"
