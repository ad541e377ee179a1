// Working memory of one thread, kept between calls and aligned to cache lines.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace tessera {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `count` floats; what they held before is lost.
  float* floats(size_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
      if (!data_) throw std::bad_alloc();
      size_ = count;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tessera
