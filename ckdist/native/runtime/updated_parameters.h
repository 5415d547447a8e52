// The parameters of an update as floats: in place, or bfloat16 that is widened, and rounded at random afterwards.
#pragma once
#include <algorithm>

#include "api/optimizer_api.h"
#include "core/mixed.h"
#include "kernels/kernels.h"

namespace ckdist {

class UpdatedParameters {
 public:
  UpdatedParameters(const Kernels& kernels, const ckdist_update& update) : kernels_(kernels), u_(update) {}

  // Calls body(values, first, count) for pieces of the parameters [at, at + count), which are in one part.
  template <class Body>
  void each(int64_t part, int64_t at, int64_t count, Body&& body) const {
    if (!u_.narrow) return body(u_.parameters + at, at, count);
    float values[kPiece];
    for (const int64_t end = at + count; at < end; at += kPiece) {
      const int64_t n = std::min(kPiece, end - at);
      kernels_.pack.bf16.widen(reinterpret_cast<const uint8_t*>(u_.narrow + at), n, values);
      body(values, at, n);
      round(part, at, n, values);
    }
  }
  // Rounds n values of a part at random to the parameters from `at` on.
  void round(int64_t part, int64_t at, int64_t n, const float* values) const {
    const ckdist_rounding& r = u_.rounding[part];
    const uint32_t key = mixed(r.key ^ mixed(uint32_t(u_.step)));
    int64_t place = r.first + at - (part ? u_.ends[part - 1] : 0);  // in the shard
    for (int64_t i = 0; i < n;) {
      const int64_t row = place / r.columns, column = place % r.columns, some = std::min(r.columns - column, n - i);
      const int64_t of_whole = row / r.rows * r.whole_rows + r.first_row + row % r.rows;
      kernels_.optimizer.round(values + i, some, mixed(key + uint32_t(of_whole) * kHashStep),
                               uint32_t(r.first_column + column), u_.narrow + at + i);
      i += some, place += some;
    }
  }

 private:
  static constexpr int64_t kPiece = 1024;  // floats that stay in the L1 cache

  const Kernels& kernels_;
  const ckdist_update& u_;
};

}  // namespace ckdist
