// Bytes that arrive before their receive is posted. Memory grows with the received bytes, not with the announced size.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory_resource>
#include <new>

namespace ckdist {

class KeptBytes {
 public:
  static constexpr int64_t kPooled = 64 << 10;  // up to this size from the pool; larger buffers are allocated and freed

  explicit KeptBytes(std::pmr::memory_resource* pool) : pool_(pool) {}
  KeptBytes(KeptBytes&& other) noexcept : pool_(other.pool_), data_(other.data_), room_(other.room_) {
    other.data_ = nullptr, other.room_ = 0;
  }
  ~KeptBytes() {
    if (room_ > kPooled) std::free(data_);
    else if (data_) pool_->deallocate(data_, size_t(room_));
  }

  uint8_t* data() const { return data_; }
  int64_t room() const { return room_; }

  // Grows the buffer towards `total` bytes and keeps its content.
  void grow(int64_t total) {
    if (total <= room_) return;
    const int64_t wanted = std::min(total, std::max(kPooled, 2 * room_));
    if (wanted <= kPooled) {
      data_ = static_cast<uint8_t*>(pool_->allocate(size_t(wanted)));
    } else {
      const bool pooled = room_ <= kPooled;
      void* const more = std::realloc(pooled ? nullptr : data_, size_t(wanted));
      if (!more) throw std::bad_alloc();
      if (pooled && data_) {
        std::memcpy(more, data_, size_t(room_));
        pool_->deallocate(data_, size_t(room_));
      }
      data_ = static_cast<uint8_t*>(more);
    }
    room_ = wanted;
  }

 private:
  std::pmr::memory_resource* pool_;
  uint8_t* data_ = nullptr;
  int64_t room_ = 0;
};

}  // namespace ckdist
