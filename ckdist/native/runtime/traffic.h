// What a rank reads of memory in a step without prompts: the matrices that it multiplies with, and what is cached of
// the positions that its tokens attend to. Experts are counted by the step that chooses them.
#pragma once
#include <cstdint>
#include <vector>

#include "runtime/batch.h"

namespace ckdist {

class Inference;

class Traffic {
 public:
  // Of the plan that `inference` is at.
  void read_plan(const Inference& inference);
  // Bytes that a step reads; every sequence has one token.
  int64_t bytes(const BatchView& batch) const;

 private:
  static constexpr int64_t kCross = -1;  // in place of a window: all that an encoder has read
  // Layers with the same window (0: all positions), and the bytes of a position in all of them.
  struct Cache {
    int64_t window, bytes;
  };
  void add_matrices(const Inference& inference, ckdist_span span);
  void add_cache(const Inference& inference, int layer, int64_t window);

  int64_t weights_ = 0;
  std::vector<Cache> caches_;
};

}  // namespace ckdist
