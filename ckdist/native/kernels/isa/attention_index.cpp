// Scores of an index of keys (sparse attention), and copies of single positions from block to block.
#include "kernels/isa/attention_index.h"

#include <cstring>

#include "kernels/isa/attention_block.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Heads at a time: their sums are in registers.
#if defined(__AVX512F__)
constexpr int kHeads = 8;
#elif defined(__AVX2__) || defined(CKDIST_NEON)
constexpr int kHeads = 4;
#else
constexpr int kHeads = 2;
#endif

// q . key of R heads. Lanes are positions.
template <KvType type, int R>
CKDIST_INLINE void products(const uint8_t* block, int width, const float* q, Vec* dot) {
  for (int r = 0; r < R; ++r) dot[r] = set(0.0f);
  for (int i = 0; i < width; ++i) {
    const int64_t at = int64_t{i} * kLanes;
    const Vec key = type == KvType::f32 ? load(reinterpret_cast<const float*>(block) + at)
                                        : load_f16(reinterpret_cast<const uint16_t*>(block) + at);
    for (int r = 0; r < R; ++r) dot[r] = fma(set(q[int64_t{r} * width + i]), key, dot[r]);
  }
}

template <KvType type, int R>
CKDIST_INLINE void store_heads(const IndexTask& task, const uint8_t* block, int h, float* out) {
  Vec dot[R];
  products<type, R>(block, task.width, task.q + int64_t{h} * task.width, dot);
  for (int r = 0; r < R; ++r) store(out + (h + r) * kLanes, dot[r]);
}

// total + the terms of R heads, in their order.
template <KvType type, int R>
CKDIST_INLINE Vec add_heads(const uint8_t* block, int width, const float* q, const float* weights, Vec total) {
  Vec dot[R];
  products<type, R>(block, width, q, dot);
  for (int r = 0; r < R; ++r) total = fma(set(weights[r]), max(dot[r], set(0.0f)), total);
  return total;
}

template <KvType type>
void score_block(const IndexTask& task, const uint8_t* block, float* out) {
  if (task.weights == nullptr) {
    int h = 0;
    for (; task.heads - h >= kHeads; h += kHeads) store_heads<type, kHeads>(task, block, h, out);
    for (; h < task.heads; ++h) store_heads<type, 1>(task, block, h, out);
    return;
  }
  Vec total = set(0.0f);
  int h = 0;
  for (; task.heads - h >= kHeads; h += kHeads)
    total = add_heads<type, kHeads>(block, task.width, task.q + int64_t{h} * task.width, task.weights + h, total);
  for (; h < task.heads; ++h)
    total = add_heads<type, 1>(block, task.width, task.q + int64_t{h} * task.width, task.weights + h, total);
  store(out, total);
}

// n units that are 16 apart: a position of a tile of K, or of scales.
template <class Unit>
void copy_units(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int64_t n) {
  const Unit* x = reinterpret_cast<const Unit*>(from) + from_slot;
  Unit* y = reinterpret_cast<Unit*>(to) + to_slot;
  for (int64_t i = 0; i < n; ++i) y[i * kBlockTokens] = x[i * kBlockTokens];
}
void copy_units(int64_t bytes, const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int64_t n) {
  if (bytes == 1) copy_units<uint8_t>(from, from_slot, to, to_slot, n);
  if (bytes == 2) copy_units<uint16_t>(from, from_slot, to, to_slot, n);
  if (bytes == 4) copy_units<uint32_t>(from, from_slot, to, to_slot, n);
}

// Codes of V: pairs of positions.
template <class Code>
void copy_value_codes(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int64_t width) {
  const Code* x = reinterpret_cast<const Code*>(from) + from_slot / 2 * width * 2 + from_slot % 2;
  Code* y = reinterpret_cast<Code*>(to) + to_slot / 2 * width * 2 + to_slot % 2;
  for (int64_t i = 0; i < width; ++i) y[2 * i] = x[2 * i];
}

// Codes of 4 bits: a byte has those of a pair of positions.
void copy_value_halves(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int64_t width) {
  const uint8_t* x = from + from_slot / 2 * width;
  uint8_t* y = to + to_slot / 2 * width;
  const int from_shift = from_slot % 2 * 4, to_shift = to_slot % 2 * 4, other = 0xf0 >> to_shift;
  for (int64_t i = 0; i < width; ++i)
    y[i] = static_cast<uint8_t>((y[i] & other) | (x[i] >> from_shift & 15) << to_shift);
}

}  // namespace

void index_scores(const IndexTask& task, const uint8_t* block, float* out) {
  if (task.type == KvType::f32) score_block<KvType::f32>(task, block, out);
  else score_block<KvType::f16>(task, block, out);
}

void attention_copy(const CacheShape& cache, const uint8_t* from, int from_slot, uint8_t* to, int to_slot) {
  const BlockLayout layout(cache);
  const auto copy_scales = [&](KvType type, int64_t offset, int64_t groups) {
    copy_units(BlockLayout::scale_bytes(type), from + offset, from_slot, to + offset, to_slot, groups);
  };
  const int pair = is_integer(cache.key_type) ? 2 : 1;  // dimensions of a unit of K
  copy_units(code_bytes(cache.key_type, 2) * pair / 2, from, from_slot, to, to_slot, cache.key_width / pair);
  copy_scales(cache.key_type, layout.k_scales_offset, key_groups(cache));
  if (cache.latent) return;
  const uint8_t* const v = from + layout.v_offset;
  uint8_t* const copied = to + layout.v_offset;
  const int64_t width = cache.value_width, bytes = code_bytes(cache.value_type, width);
  if (!is_integer(cache.value_type)) std::memcpy(copied + to_slot * bytes, v + from_slot * bytes, bytes);
  else if (cache.value_type == KvType::q4_0) copy_value_halves(v, from_slot, copied, to_slot, width);
  else if (cache.value_type == KvType::q8_0) copy_value_codes<int8_t>(v, from_slot, copied, to_slot, width);
  else copy_value_codes<int16_t>(v, from_slot, copied, to_slot, width);
  copy_scales(cache.value_type, layout.v_scales_offset, width / layout.v_group);
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
