// Writing keys and values into blocks of the KV cache: rounding to the cache's type, and the scales of q8_0.
#include "kernels/isa/attention_store.h"

#include <type_traits>

#include "kernels/isa/attention_block.h"
#include "kernels/isa/attention_integer.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr float kLargestF16 = 65504.0f;

CKDIST_INLINE Vec load_lanes(const float* x, int lanes) { return lanes < kLanes ? load_n(x, lanes) : load(x); }

// NaN stays NaN.
CKDIST_INLINE Vec clamp(Vec x, float limit) { return max(set(-limit), min(set(limit), x)); }

// codes[i * step] = lanes[i]: keys stand 16 elements apart, values one after another.
template <class Code>
CKDIST_INLINE void lay_out(const Code* lanes, int n, int64_t step, Code* codes) {
  for (int i = 0; i < n; ++i) codes[i * step] = lanes[i];
}

void write_f32(const float* x, int head_dim, int64_t step, float* tile) { lay_out(x, head_dim, step, tile); }

// Finite numbers stay finite, or one large key would turn a whole row of scores into NaN.
void write_f16(const float* x, int head_dim, int64_t step, uint16_t* tile) {
  for (int i = 0; i < head_dim; i += kLanes) {
    const int n = head_dim - i < kLanes ? head_dim - i : kLanes;
    uint16_t lanes[kLanes];
    store_f16(lanes, clamp(load_lanes(x + i, n), kLargestF16));
    lay_out(lanes, n, step, tile + i * step);
  }
}

void write_bf16(const float* x, int head_dim, int64_t step, uint16_t* tile) {
  for (int i = 0; i < head_dim; ++i) tile[i * step] = to_bf16(x[i]);
}

// Codes are relative to the scale as it is stored, after its rounding to float16; scales: one for each group, 16 apart.
// False where any x is NaN or infinite.
bool quantise_q8(const float* x, int head_dim, int group, int8_t* codes, uint16_t* scales) {
  bool finite = true;
  for (int start = 0; start < head_dim; start += group) {
    Vec largest = set(0.0f), probe = set(0.0f);
    for (int i = start; i < start + group; i += kLanes) {
      const Vec a = load_lanes(x + i, start + group - i);
      largest = max(largest, abs(a));
      probe = fma(a, set(0.0f), probe);
    }
    finite = finite && reduce_sum(probe) == 0.0f;
    const float ideal = reduce_max(largest) / 127.0f;
    const uint16_t scale = to_f16(ideal > kLargestF16 ? kLargestF16 : ideal);
    const float stored = from_f16(scale);
    const Vec inverse = set(stored > 0.0f ? 1.0f / stored : 0.0f);
    for (int i = start; i < start + group; i += kLanes) {
      const int n = start + group - i < kLanes ? start + group - i : kLanes;
      int8_t lanes[kLanes];
      store_i8(lanes, clamp(load_lanes(x + i, n) * inverse, 127.0f));
      std::memcpy(codes + i, lanes, n);
    }
    scales[start / group * kBlockTokens] = scale;
  }
  return finite;
}

// Codes into the pairs of a block: two dimensions of a key side by side, two positions of a value.
template <class Code>
void lay_out_pairs(const Code* k, const Code* v, int slot, int head_dim, uint8_t* block, const BlockLayout& layout) {
  using Pair = std::conditional_t<sizeof(Code) == 2, uint32_t, uint16_t>;
  using Bits = std::make_unsigned_t<Code>;
  constexpr int bits = 8 * sizeof(Code);
  Code* key = reinterpret_cast<Code*>(block) + 2 * slot;
  Pair* value = reinterpret_cast<Pair*>(block + layout.v_offset) + slot / 2 * head_dim;
  for (int i = 0; i < head_dim; i += 2) std::memcpy(key + i * kBlockTokens, k + i, 2 * sizeof(Code));
  const int shift =
      slot % 2 * bits;  // whole pairs are written, whose other half stays: in vectors, unlike every second code
  const Pair other = static_cast<Pair>(static_cast<Pair>(static_cast<Bits>(-1)) << (bits - shift));
  for (int i = 0; i < head_dim; ++i)
    value[i] = static_cast<Pair>((value[i] & other) | static_cast<Pair>(static_cast<Bits>(v[i])) << shift);
}

constexpr int kMostDimensions = 4096;

// A key or value with NaN or infinity makes the scale of the key NaN: every query that sees the position then shows it.
void store_q8(uint8_t* block, int slot, int head_dim, const float* k, const float* v, const BlockLayout& layout) {
  int8_t key[kMostDimensions], value[kMostDimensions];
  uint16_t* k_scales = reinterpret_cast<uint16_t*>(block + layout.k_scales_offset) + slot;
  const bool finite = quantise_q8(k, head_dim, layout.group, key, k_scales);
  if (!quantise_q8(v, head_dim, layout.group, value,
                   reinterpret_cast<uint16_t*>(block + layout.v_scales_offset) + slot) ||
      !finite)
    k_scales[0] = 0x7e00;
  lay_out_pairs(key, value, slot, head_dim, block, layout);
}

void store_i16(uint8_t* block, int slot, int head_dim, const float* k, const float* v, const BlockLayout& layout) {
  int16_t key[kMostDimensions], value[kMostDimensions];
  float* k_scale = reinterpret_cast<float*>(block + layout.k_scales_offset) + slot;
  float* v_scale = reinterpret_cast<float*>(block + layout.v_scales_offset) + slot;
  *k_scale = quantise(k, head_dim, kLargestCode, kLongest, key);
  *v_scale = quantise(v, head_dim, kLargestValue, __builtin_inff(), value);
  if (*v_scale != *v_scale) *k_scale = *v_scale;
  lay_out_pairs(key, value, slot, head_dim, block, layout);
}

void write_plain(KvType type, const float* x, int head_dim, int64_t step, uint8_t* tile) {
  if (type == KvType::f32) return write_f32(x, head_dim, step, reinterpret_cast<float*>(tile));
  if (type == KvType::f16) return write_f16(x, head_dim, step, reinterpret_cast<uint16_t*>(tile));
  write_bf16(x, head_dim, step, reinterpret_cast<uint16_t*>(tile));
}

}  // namespace

int64_t attention_block_bytes(KvType type, int head_dim) { return BlockLayout(type, head_dim).bytes; }

void attention_store(KvType type, uint8_t* block, int slot, int head_dim, const float* k, const float* v) {
  const BlockLayout layout(type, head_dim);
  if (type == KvType::q8_0) return store_q8(block, slot, head_dim, k, v, layout);
  if (type == KvType::i16) return store_i16(block, slot, head_dim, k, v, layout);
  write_plain(type, k, head_dim, kBlockTokens, block + code_bytes(type) * slot);
  write_plain(type, v, head_dim, 1, block + layout.v_offset + code_bytes(type) * slot * head_dim);
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
