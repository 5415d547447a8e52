// A batch's rows grouped by expert, for training. Groups are concatenated in the order of experts; within a group rows
// are in the order of tokens.
#pragma once
#include "runtime/training.h"

namespace ckdist {

struct ExpertGroups {
  int64_t* starts;   // (experts + 1,): first row of each group
  int32_t* tokens;   // (tokens * used,): token of each row
  int32_t* slots;    // (tokens * used,): index of the row's expert among its token's experts
  int32_t* touched;  // (experts,): experts that have rows, ascending
  int64_t* count;    // number of experts that have rows

  static ExpertGroups carve(Carver& c, const Training& r, int chosen, int64_t experts) {
    const int64_t rows = r.program.max_tokens * r.width(chosen);
    return {c.array<int64_t>(experts + 1), c.array<int32_t>(rows), c.array<int32_t>(rows), c.array<int32_t>(experts),
            c.array<int64_t>(1)};
  }

  int64_t rows(int64_t expert) const { return starts[expert + 1] - starts[expert]; }

  void make(const Training& r, int chosen, int64_t experts) const {
    const int64_t used = r.width(chosen);
    const auto each = [&](auto&& body) {
      for (int64_t t = 0; t < r.batch.tokens; ++t) {
        const int32_t* const of = reinterpret_cast<const int32_t*>(r.floats(chosen, t));
        for (int64_t slot = 0; slot < used; ++slot) body(of[slot], int32_t(t), int32_t(slot));
      }
    };
    std::fill_n(starts, experts + 1, 0);
    each([&](int32_t e, int32_t, int32_t) { ++starts[e + 1]; });
    *count = 0;
    for (int64_t e = 0; e < experts; ++e) {
      if (starts[e + 1] > 0) touched[(*count)++] = int32_t(e);
      starts[e + 1] += starts[e];
    }
    each([&](int32_t e, int32_t token, int32_t slot) { tokens[starts[e]] = token, slots[starts[e]++] = slot; });
    // The second pass has moved each start to the end of its group.
    for (int64_t e = experts; e > 0; --e) starts[e] = starts[e - 1];
    starts[0] = 0;
  }
};

}  // namespace ckdist
