// Memory that ops need while they run: aligned, kept between calls, growing only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

namespace trunkline {

class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes` bytes at an address divisible by 64. Contents do not survive growth; new memory is zero.
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      const size_t size = (std::max(bytes, size_ + size_ / 2) + 63) / 64 * 64;
      release();
      memory_ = static_cast<char*>(::operator new(size, std::align_val_t{64}));
      std::memset(memory_, 0, size);
      size_ = size;
    }
    return memory_;
  }

  // What `reserve` returned last.
  char* memory() const { return memory_; }

 private:
  void release() {
    if (memory_ != nullptr) ::operator delete(memory_, std::align_val_t{64});
    memory_ = nullptr;
    size_ = 0;
  }

  char* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace trunkline
