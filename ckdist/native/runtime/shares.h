// How the bytes of one product's weights are cut over the threads of a rank: each thread has a first piece of its own, and what
// remains goes in smaller pieces to whoever is free.
#pragma once
#include <algorithm>
#include <cstdint>

namespace ckdist {

class Shares {
 public:
  // Few tokens are bound by memory, where long runs count, and where threads that read unequally fast must still end together:
  // three quarters are cut beforehand, the rest in pieces that take a few microseconds. Many tokens are bound by arithmetic.
  Shares(int64_t bytes, int threads, bool few_tokens) : threads_(threads), bytes_(bytes) {
    if (threads == 1) {
      first_ = bytes, rest_ = 1;
    } else if (few_tokens) {
      first_ = bytes / threads / 4 * 3;
      rest_ = std::max<int64_t>(kSmallBytes, (bytes - first_ * threads) / (threads * 8));
    } else {
      first_ = rest_ = (bytes + threads * 8 - 1) / (threads * 8);
    }
  }

  int64_t pieces() const { return threads_ + (bytes_ - first_ * threads_ + rest_ - 1) / rest_; }
  int64_t begin(int64_t piece) const {
    return piece < threads_ ? piece * first_ : std::min(first_ * threads_ + (piece - threads_) * rest_, bytes_);
  }

 private:
  static constexpr int64_t kSmallBytes = 64 << 10;
  int64_t threads_, bytes_, first_, rest_;
};

}  // namespace ckdist
