// The functions of the kernels' ptx.cuh, played over the 32 fibers of a warp with the fragment layouts of the PTX manual.
#pragma once
#include "elements.cuh"

#define DYNAMIC_SHARED(name) unsigned char* name = shim::block.dynamic_shared

// In flight the target is unset; the data arrive at the wait. So what reads too early, and what is still being read
// when a copy starts, are both seen.
template <int BYTES>
void copy_async(void* to, const void* from, bool valid) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % BYTES)
    shim::fail("an asynchronous copy is not aligned");
  unsigned char* target = static_cast<unsigned char*>(to);
  for (int i = 0; i < BYTES; ++i) target[i] = shim::UNSET;
  shim::Fiber& me = *shim::self;
  if (me.num_copies == shim::MAX_COPIES) shim::fail("more asynchronous copies than the shim can hold");
  me.copies[me.num_copies++] = {target, valid ? static_cast<const unsigned char*>(from) : nullptr, BYTES};
}
inline void copy_async_wait() {
  shim::Fiber& me = *shim::self;
  for (int n = 0; n < me.num_copies; ++n)
    for (int i = 0; i < me.copies[n].bytes; ++i) me.copies[n].to[i] = me.copies[n].from ? me.copies[n].from[i] : 0;
  me.num_copies = 0;
}

namespace shim {
struct MatrixRow {
  uint32_t words[4];
};
inline MatrixRow read_row(const void* row, const Place& place) {  // seen by sanitizers: the lane's own read
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("a row of a matrix is not aligned: " + at(place));
  MatrixRow read;
  for (int i = 0; i < 4; ++i) read.words[i] = static_cast<const uint32_t*>(row)[i];
  return read;
}
UNSEEN inline void load_matrices(unsigned (&m)[4], const MatrixRow& mine, bool transposed, const Place& place) {
  const auto* rows = exchange(mine.words, place);
  const auto element = [&](int matrix, int row, int column) UNSEEN {
    return rows[matrix * 8 + row][column / 2] >> column % 2 * 16 & 0xffff;
  };
  const int major = lane() / 4, minor = lane() % 4 * 2;
  for (int i = 0; i < 4; ++i)
    m[i] = transposed ? element(i, minor, major) | element(i, minor + 1, major) << 16
                      : element(i, major, minor) | element(i, major, minor + 1) << 16;
}

// a: row lane / 4 (+ 8), columns 2 * (lane % 4) and the next (+ 8). b: column lane / 4, rows as a's columns.
template <class T>
UNSEEN void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const Place& place) {
  const auto half = [](unsigned word, int which) UNSEEN {
    return std::bit_cast<uint32_t>(to_float(T{static_cast<uint16_t>(word >> 16 * which)}));
  };
  uint32_t mine[12];
  for (int i = 0; i < 8; ++i) mine[i] = half(a[i / 2], i % 2);
  for (int i = 0; i < 4; ++i) mine[8 + i] = half(i < 2 ? b0 : b1, i % 2);
  const auto* offers = exchange(mine, place);
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4, column = lane() % 4 * 2 + i % 2, lower = i / 2;
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2, right = k / 8;
      c[i] += __builtin_bit_cast(float, offers[row * 4 + from][(lower + 2 * right) * 2 + k % 2]) *
              __builtin_bit_cast(float, offers[column * 4 + from][8 + right * 2 + k % 2]);
    }
  }
}
}  // namespace shim

inline void load_matrices(unsigned (&m)[4], const void* row, shim::Place place = shim::Place::current()) {
  shim::load_matrices(m, shim::read_row(row, place), false, place);
}
inline void load_matrices_transposed(unsigned (&m)[4], const void* row, shim::Place place = shim::Place::current()) {
  shim::load_matrices(m, shim::read_row(row, place), true, place);
}
template <class T>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, T,
                  shim::Place place = shim::Place::current()) {
  shim::multiply_add<T>(c, a, b0, b1, place);
}
