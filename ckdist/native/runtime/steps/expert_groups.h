// A batch's rows by expert, as training computes them: an expert's behind those of the one before it, in the order of
// tokens.
#pragma once
#include <algorithm>

#include "runtime/training.h"

namespace ckdist {

struct ExpertGroups {
  int64_t* starts;   // (experts + 1,): where the rows of each begin
  int32_t* tokens;   // (tokens * used,): of each row
  int32_t* slots;    // likewise: as which of its token's experts
  int32_t* touched;  // (experts,): those that have rows, in order
  int64_t* count;    // of these

  static ExpertGroups carve(Carver& c, const Training& r, int chosen, int64_t experts) {
    const int64_t rows = r.program.max_tokens * r.width(chosen);
    const auto numbers = [&](int64_t n) { return reinterpret_cast<int32_t*>(c.bytes(4 * n)); };
    int64_t* const starts = reinterpret_cast<int64_t*>(c.bytes(8 * (experts + 1)));
    int32_t *const tokens = numbers(rows), *const slots = numbers(rows), *const touched = numbers(experts);
    return {starts, tokens, slots, touched, reinterpret_cast<int64_t*>(c.bytes(8))};
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
    for (int64_t e = experts; e > 0; --e) starts[e] = starts[e - 1];  // they stood at their ends
    starts[0] = 0;
  }
};

}  // namespace ckdist
