// What the linear layers share: weights in panels, tokens in tiles, and tiles dealt to threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "vectors.hpp"

namespace tessera {

// A panel is COLUMNS outputs, side by side for each input. A tile is a panel by at most TILE_ROWS tokens: as many as
// leave a quarter of the registers for its operands.
#if defined(__AVX512F__)
constexpr int WIDE = 16, TILE_ROWS = 12;
#elif defined(__AVX2__)
constexpr int WIDE = 8, TILE_ROWS = 6;
#elif defined(__ARM_NEON)
constexpr int WIDE = 4, TILE_ROWS = 12;
#else
constexpr int WIDE = 4, TILE_ROWS = 6;
#endif
constexpr int COLUMNS = 2 * WIDE;

constexpr int64_t BLOCK_BYTES = 256 << 10;  // activations that stay in the second-level cache while panels pass
constexpr int64_t STREAM_AHEAD = 8 << 10;   // bytes between a weight that is read and the one that is asked for

typedef float WideFloats __attribute__((vector_size(4 * WIDE)));
typedef int32_t WideInts __attribute__((vector_size(4 * WIDE)));

TESSERA_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Vector> TESSERA_INLINE Vector load_as(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

struct Tile {
  int64_t token;
  int rows;
  int64_t panel;
  int64_t place, places;  // among the tiles that meet the panel while it is cached
};

// The tiles of a product that no thread has yet. Who comes takes a share of what is left, so that all end together
// where one thread is slower or begins later.
class Tiles {
 public:
  explicit Tiles(int64_t count) : count_(count) {}

  // The next tiles [begin, end); false if there are none.
  bool take(int64_t& begin, int64_t& end) {
    const int64_t threads = omp_get_num_threads();
    begin = next_.load(std::memory_order_relaxed);
    do {
      if (begin >= count_) return false;
      const int64_t share = threads == 1 ? count_ : std::max((count_ - begin) / (2 * threads), count_ / (32 * threads));
      end = std::min(count_, begin + std::max<int64_t>(1, share));
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
  }

 private:
  const int64_t count_;
  std::atomic<int64_t> next_{0};
};

// Weights times activations, cut into tiles that the threads of a team take.
class Product {
 public:
  Product(int64_t tokens, int64_t outputs, int64_t parts, int64_t bytes_of_part)
      : tokens_(tokens), rows_(ceil_div(tokens, TILE_ROWS)), panels_(ceil_div(outputs, COLUMNS)), parts_(parts),
        block_(std::max<int64_t>(1, BLOCK_BYTES / (TILE_ROWS * std::max<int64_t>(1, bytes_of_part)))),
        tiles_(rows_ * panels_) {}

  // Calls run(tile, part) for tiles that no other thread of the team gets. A block of tokens meets each panel in turn,
  // and does so again for each part of the inputs. Tokens are spread evenly over tiles.
  template <class Run> void deal(const Run& run) {
    for (int64_t begin, end; tiles_.take(begin, end);)
      while (begin < end) {
        const int64_t first = begin / (block_ * panels_) * block_, places = std::min(block_, rows_ - first);
        const int64_t stop = std::min(end, (first + places) * panels_);
        for (int64_t part = 0; part < parts_; ++part)
          for (int64_t i = begin - first * panels_; i < stop - first * panels_; ++i) {
            const int64_t place = i % places, token = tokens_ * (first + place) / rows_;
            const int64_t rows = tokens_ * (first + place + 1) / rows_ - token;
            run(Tile{token, static_cast<int>(rows), i / places, place, places}, part);
          }
        begin = stop;
      }
  }

 private:
  const int64_t tokens_, rows_, panels_, parts_, block_;
  Tiles tiles_;
};

// run(std::integral_constant<int, rows>()) for 1 <= rows <= TILE_ROWS.
template <int R = TILE_ROWS, class Run> TESSERA_INLINE void with_rows(int rows, const Run& run) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, run);
  run(std::integral_constant<int, R>());
}

// The activations of R tokens at one input, which moves on. A pointer for every third row: one for each would not fit
// into the registers, and the compiler must not know that they are related, or it makes twelve of them again.
template <int R, class T> class Rows {
 public:
  TESSERA_INLINE Rows(const T* x, int64_t stride) : stride_(stride) {
    for (int i = 0; i < POINTERS; ++i) {
      at_[i] = x + 3 * i * stride;
      asm("" : "+r"(at_[i]));
    }
  }
  TESSERA_INLINE const T* operator[](int row) const { return at_[row / 3] + row % 3 * stride_; }
  TESSERA_INLINE void advance(int count) {
    for (int i = 0; i < POINTERS; ++i) at_[i] += count;
  }

 private:
  static constexpr int POINTERS = (R + 2) / 3;
  const T* at_[POINTERS];
  int64_t stride_;
};

// Asks for weights while a tile works: for its share of the next panel or, where a tile is alone with its panel, for
// what follows in the stream. The hardware's own requests stop at a page's end and do not know of panels.
template <int STEP> class Ahead {
 public:
  // `weights` is where the tile begins to read, `bytes` what it reads, `panel_bytes` the distance between panels.
  Ahead(const Tile& tile, const void* weights, int64_t bytes, int64_t panel_bytes) : step_(STEP / tile.places) {
    next_ = static_cast<const char*>(weights);
    next_ += tile.places == 1 ? std::min(panel_bytes, STREAM_AHEAD) : panel_bytes + bytes * tile.place / tile.places;
  }
  // Once for each STEP bytes that the tile reads.
  TESSERA_INLINE void ask() {
    for (int i = 0; i < STEP; i += 64) __builtin_prefetch(next_ + i, 0, 2);
    next_ += step_;
  }

 private:
  const char* next_;
  int64_t step_;
};

// A row of a tile, of which `columns` are stored.
TESSERA_INLINE void store_columns(float* to, WideFloats low, WideFloats high, int columns) {
  if (columns == COLUMNS) {
    std::memcpy(to, &low, sizeof low);
    std::memcpy(to + WIDE, &high, sizeof high);
    return;
  }
  float row[COLUMNS];
  store_columns(row, low, high, COLUMNS);
  std::copy_n(row, columns, to);
}

}  // namespace tessera
