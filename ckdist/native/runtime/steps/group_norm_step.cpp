// The norm over groups of consecutive elements of a row, and the sums of squares of heads that ranks exchange for it.
#include <cmath>

#include "runtime/inference.h"

namespace ckdist {
namespace {

struct HeadSquares : StepRun<Inference, ckdist_head_squares_step> {
  void run() {
    int64_t x_stride, stride;
    const float* const x = r.floats(step.x, &x_stride);  // (tokens, local heads * head_width)
    float* const out = r.floats(step.out, &stride);      // (tokens, heads)
    const int64_t heads = r.value(step.x).width / step.head_width;
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) {
      float* const row = out + t * stride;
      std::fill(row, row + step.heads, 0.f);
      for (int64_t h = 0; h < heads; h++)
        row[step.first_head + h] =
            r.kernels.elementwise.sum_squares(x + t * x_stride + h * step.head_width, step.head_width);
    }
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

struct GroupNorm : StepRun<Inference, ckdist_group_norm_step> {
  // Buffers of one thread: the squares of a token's heads, and the heads if they lie in several slots.
  static int64_t thread_bytes(const Inference&, const Fields& step) {
    return step.heads * (1 + (step.parts ? step.head_width : 0)) * int64_t{sizeof(float)};
  }

  void run() {
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) make_row(t);
    r.finish(thread, index, step.out, r.local_tokens);
  }

  void make_row(int64_t token) {
    int64_t stride;
    float* const out = r.floats(step.out, &stride) + token * stride;
    const float* const row = row_of(token);
    const float* const squares = squares_of(token, row);
    const int64_t heads = r.value(step.out).width / step.head_width, group = step.heads / step.groups;
    int32_t norm = step.norm;
    for (int64_t h = 0, part = 0, begin = 0; h < heads; h++) {
      for (; part < step.parts && h >= step.ends[part]; part++)
        norm += step.ends[part] > begin, begin = step.ends[part];
      const int64_t first = (step.first_head + h) / group * group, at = h * step.head_width;
      float sum = 0.f;
      for (int64_t i = 0; i < group; i++) sum += squares[first + i];
      const float by = 1.f / std::sqrt(sum / float(group * step.head_width) + step.eps);
      const float* const weight = r.vector(norm) + (h - begin) * step.head_width;
      r.kernels.elementwise.scale_weighted(row + at, by, weight, step.head_width, out + at);
    }
  }

  // A token's row of x.
  const float* row_of(int64_t token) const {
    if (step.parts == 0) {
      int64_t stride;
      const float* const x = r.floats(step.x, &stride);
      return x + token * stride;
    }
    float* const row = reinterpret_cast<float*>(r.memory(thread)) + step.heads;
    for (int64_t rank = 0, begin = 0; rank < step.parts; begin = step.ends[rank++]) {
      const int64_t width = (step.ends[rank] - begin) * step.head_width;
      const float* const from = r.peer_slot(r.value(step.x), int(rank)) + (r.first_token + token) * width;
      std::copy(from, from + width, row + begin * step.head_width);
      r.count_moved(thread, rank == r.ranks->local_rank ? 0 : width * int64_t{sizeof(float)});
    }
    return row;
  }

  // The sums of squares of a token's heads, of all ranks.
  const float* squares_of(int64_t token, const float* row) const {
    float* const sums = reinterpret_cast<float*>(r.memory(thread));
    if (step.squares < 0) {
      for (int64_t h = 0; h < step.heads; h++)
        sums[h] = r.kernels.elementwise.sum_squares(row + h * step.head_width, step.head_width);
      return sums;
    }
    const ckdist_value& v = r.value(step.squares);
    const float* parts[kMaxRanks];
    int64_t stride;
    int count = 1;
    if (v.place == ckdist_place_slot) count = r.ranks->summands(int(v.offset), parts);
    else parts[0] = r.floats(step.squares, &stride);
    for (int p = 0; p < count; p++) parts[p] += token * v.width;
    if (count == 1) return parts[0];
    r.kernels.elementwise.sum_parts(nullptr, parts, count, v.width, sums);
    return sums;
  }
};

const RegisteredKind<HeadSquares> kSquares(ckdist_step_head_squares);
const RegisteredKind<GroupNorm> kNorm(ckdist_step_group_norm);

}  // namespace
}  // namespace ckdist
