// Top-k and top-p: the weights of a row that a draw may not come from become zero. engine/truncation.py has the plain
// version. Rows are not sorted: the least weight that stays is found digit by digit of its bits, which are ordered as
// the floats are.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.hpp"

namespace tessera {
namespace {

// The bit of a weight at which each digit begins, and the one after it: sign, exponent and three bits of the fraction
// first, then ten bits each.
constexpr int BEGIN[] = {20, 10, 0}, END[] = {32, 20, 10};

// Most cuts lie among so heavy weights, where the largest is 1: some hundreds of a vocabulary.
constexpr float HEAVY = 0x1p-12f;

struct Digit {
  double mass;  // of the weights that have it
  int64_t count;
};

// What is larger than a weight.
struct Above {
  double mass = 0;
  int64_t count = 0;
};

struct Limits {
  int64_t count;  // a weight stays if fewer than so many are larger
  double mass;    // and if those are lighter than this
};

// The digits of one level of the weights whose bits begin with `prefix`. Sums are in the order of the row.
// Apart: inlined it is half as fast.
__attribute__((noinline)) void count_digits(const float* row, int64_t size, int level, uint32_t prefix,
                                            std::vector<Digit>& digits) {
  const int begin = BEGIN[level], end = END[level];
  const uint64_t mask = (uint64_t{1} << (end - begin)) - 1;
  digits.assign(mask + 1, Digit{});
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t bits = bit_cast<uint32_t>(row[i]);
    if (bits >> end != prefix) continue;
    Digit& digit = digits[(bits >> begin) & mask];
    digit.mass += row[i];
    ++digit.count;
  }
}

// The least weight within the limits, of which the largest always is; `above` becomes what is larger than it.
// `digits` are those of level 0, and are lost.
float least_kept(const float* row, int64_t size, const Limits& limits, std::vector<Digit>& digits, Above& above) {
  uint32_t bits = 0;
  for (int level = 0; level < 3; ++level) {
    if (level > 0) count_digits(row, size, level, bits, digits);
    int chosen = -1;
    Above larger = above;
    for (int digit = static_cast<int>(digits.size()) - 1; digit >= 0; --digit) {
      if (digits[digit].count == 0) continue;
      const bool within = larger.count < limits.count && larger.mass < limits.mass;
      if (chosen >= 0 && !within) break;
      chosen = digit;
      above = larger;
      larger.mass += digits[digit].mass;
      larger.count += digits[digit].count;
    }
    bits = (level == 0 ? 0 : bits << (END[level] - BEGIN[level])) | static_cast<uint32_t>(chosen);
  }
  return bit_cast<float>(bits);
}

// In an order of its own, which the vectors of every build have.
double sum(const float* row, int64_t size) {
  double sums[LANES] = {}, total = 0;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    for (int lane = 0; lane < LANES; ++lane) sums[lane] += row[i + lane];
  for (; i < size; ++i) total += row[i];
  for (const double part : sums) total += part;
  return total;
}

// The weights that are at least HEAVY to the front of `heavy`, in the order of the row; returns how many, 0 if they are
// an eighth of the row or more, which is no quicker to go through.
int64_t collect_heavy(const float* row, int64_t size, std::vector<float>& heavy) {
  constexpr int64_t STRETCH = 4 * LANES;  // of which most have none
  if (heavy.size() < static_cast<size_t>(size)) heavy.resize(size);
  int64_t count = 0;
  for (int64_t i = 0; i < size; i += STRETCH) {
    if (count >= (size + 7) / 8) return 0;
    const int64_t end = std::min(size, i + STRETCH);
    if (end - i == STRETCH) {
      Floats top = load(row + i);
      for (int k = LANES; k < STRETCH; k += LANES) top = larger(top, load(row + i + k));
      if (largest_lane(top) < HEAVY) continue;
    }
    for (int64_t k = i; k < end; ++k) {
      heavy[count] = row[k];
      count += row[k] >= HEAVY;
    }
  }
  return count;
}

void truncate(float* row, int64_t size, int64_t top_k, double top_p) {
  thread_local std::vector<float> heavy;
  thread_local std::vector<Digit> first, digits;
  double total = sum(row, size);
  const int64_t num_heavy = collect_heavy(row, size, heavy);
  // Where the heavy ones reach the limit, no other weight stays.
  const bool are_enough = top_k < size ? num_heavy >= top_k : sum(heavy.data(), num_heavy) >= top_p * total;
  const bool fewer = num_heavy > 0 && are_enough;
  const float* weights = fewer ? heavy.data() : row;
  const int64_t count = fewer ? num_heavy : size;

  count_digits(weights, count, 0, 0, first);
  float least = 0;
  if (top_k < size) {
    Above above;
    digits = first;
    least = least_kept(weights, count, {top_k, INFINITY}, digits, above);
    total = above.mass + static_cast<double>(top_k - above.count) * least;
  }
  if (top_p < 1) {
    Above above;
    least = least_kept(weights, count, {top_k, top_p * total}, first, above);
  }
  for (int64_t i = 0; i < size; ++i) row[i] = row[i] < least ? 0.f : row[i];
}

}  // namespace
}  // namespace tessera

using namespace tessera;

extern "C" {

// weights [any, size], of which `rows` [num_rows] are truncated in place, each by its own top_k, from 1 to size, and
// top_p, of what top_k leaves. Weights are not negative; a row with a NaN gets a result that means nothing.
void tessera_truncate(float* weights, int64_t size, const int64_t* rows, int64_t num_rows, const int64_t* top_k,
                      const double* top_p, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(num_rows < threads ? static_cast<int32_t>(num_rows) : threads)
  for (int64_t i = 0; i < num_rows; ++i) truncate(weights + rows[i] * size, size, top_k[i], top_p[i]);
}

}  // extern "C"
