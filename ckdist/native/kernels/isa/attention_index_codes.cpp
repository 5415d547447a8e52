// Scores of an index of keys in 16-bit integers. They have the precision of f16, as those of attention have, and take
// half of the instructions.
#include "kernels/isa/attention_index.h"
#include "kernels/isa/attention_integer.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Heads and blocks at a time: their sums are in registers. Two blocks share the loads of queries.
#if defined(__AVX512F__)
constexpr int kHeads = 8, kBlocks = 2;
#else
constexpr int kHeads = 4, kBlocks = 1;
#endif

// Calls add(block, head, q . key) for R heads from `h` on and B blocks. Lanes are positions.
template <int R, int B, class Add>
CKDIST_INLINE void products(const IndexTask& task, const int16_t* const* blocks, int h, Add&& add) {
  const int16_t* const codes = task.codes + int64_t{h} * task.width;
  Ints sums[R][B], keys[B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) sums[r][b] = zeros();
  for (int i = 0; i < task.width; i += 2) {
    for (int b = 0; b < B; ++b) keys[b] = load_pairs(blocks[b] + int64_t{i} * kLanes);
    for (int r = 0; r < R; ++r) {
      const Ints query = set_pair(codes + int64_t{r} * task.width + i);
      for (int b = 0; b < B; ++b) sums[r][b] = dot(sums[r][b], keys[b], query);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) add(b, h + r, to_floats(sums[r][b]) * set(task.scales[h + r]));
}

template <int B>
CKDIST_INLINE void score(const IndexTask& task, const int16_t* const* blocks, float* out) {
  Vec scales[B], totals[B];
  for (int b = 0; b < B; ++b) {
    scales[b] = load(reinterpret_cast<const float*>(blocks[b] + int64_t{kBlockTokens} * task.width));
    totals[b] = set(0.0f);
  }
  const auto add = [&](int b, int h, Vec product) __attribute__((always_inline)) {
    if (task.weights) totals[b] = fma(set(task.weights[h]), max(product, set(0.0f)), totals[b]);
    else store(out + (b * task.heads + h) * kLanes, product * scales[b]);
  };
  int h = 0;
  for (; task.heads - h >= kHeads; h += kHeads) products<kHeads, B>(task, blocks, h, add);
  for (; task.heads - h >= 4; h += 4) products<4, B>(task, blocks, h, add);
  for (; h < task.heads; ++h) products<1, B>(task, blocks, h, add);
  for (int b = 0; task.weights && b < B; ++b) store(out + b * kLanes, totals[b] * scales[b]);
}

}  // namespace

void index_codes(const float* q, int width, int heads, int16_t* codes, float* scales) {
  for (int h = 0; h < heads; ++h)
    scales[h] = quantise(q + int64_t{h} * width, width, kLargestCode, kLongest, codes + int64_t{h} * width);
}

void code_scores(const IndexTask& task, const uint8_t* const* blocks, int count, float* out) {
  const int64_t each = task.weights ? kLanes : int64_t{kLanes} * task.heads;
  int b = 0;
  for (; count - b >= kBlocks; b += kBlocks) {
    const int16_t* codes[kBlocks];
    for (int i = 0; i < kBlocks; ++i) codes[i] = reinterpret_cast<const int16_t*>(blocks[b + i]);
    score<kBlocks>(task, codes, out + b * each);
  }
  for (; b < count; ++b) {
    const auto* const codes = reinterpret_cast<const int16_t*>(blocks[b]);
    score<1>(task, &codes, out + b * each);
  }
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
