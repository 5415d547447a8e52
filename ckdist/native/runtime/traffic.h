// Counts the bytes that a rank reads from memory in a step without prompts: its matrices, and the cached keys and
// values of the positions that its tokens attend to. Steps that choose experts count those themselves.
#pragma once
#include <vector>

#include "api/steps_api.h"
#include "runtime/batch.h"

namespace ckdist {

class Inference;

class Traffic {
 public:
  // Reads the current plan of `inference`.
  void read_plan(const Inference& inference);
  // Bytes that a step reads. Every sequence has one token.
  int64_t bytes(const BatchView& batch) const;

 private:
  static constexpr int64_t kCross = INT64_MAX;  // in place of a window: all of the encoder's output
  // Bytes of one position in all layers with the same window (0: all positions).
  struct Cache {
    int64_t window, bytes;
  };
  void add_matrices(const Inference& inference, ckdist_span span);
  void add_cache(const Inference& inference, int layer, int64_t window);
  void add_bytes(int64_t block_bytes, int64_t window);

  int64_t weights_ = 0;
  std::vector<Cache> caches_;
};

}  // namespace ckdist
