// One anonymous mapping in huge pages where the kernel has them, placed on the node of whoever touches it first.
#pragma once
#include <cstdint>

namespace ckdist {

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void reserve(int64_t bytes);
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace ckdist
