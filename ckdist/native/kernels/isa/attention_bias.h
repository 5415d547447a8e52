// Biases of the scores of one query, by the distance of keys. Private to isa/.
#pragma once
#include "kernels/attention.h"

namespace ckdist {
namespace CKDIST_ISA {

class ScoreBias {
 public:
  ScoreBias() = default;
  // Biases for the query in `row` of a task that has biases.
  ScoreBias(const AttentionTask& task, int64_t row)
      : at_(task.bias + row % task.heads * (2 * task.bias_reach + 1) + task.bias_reach),
        query_(task.first_position + row / task.heads),
        end_(task.bias_reach) {}

  float of(int64_t key) const {
    const int64_t distance = key - query_;
    return at_[distance < -end_ ? -end_ : distance > end_ ? end_ : distance];
  }

 private:
  const float* at_ = nullptr;  // bias of distance 0
  int64_t query_ = 0, end_ = 0;
};

}  // namespace CKDIST_ISA
}  // namespace ckdist
