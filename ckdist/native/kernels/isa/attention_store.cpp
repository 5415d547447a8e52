// Writes keys and values to blocks of the KV cache: rounding to the cache's type, and the scales of q8_0 and q4_0.
#include "kernels/isa/attention_store.h"

#include <type_traits>

#include "kernels/isa/attention_block.h"
#include "kernels/isa/attention_integer.h"
#include "kernels/isa/attention_rotation.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr float kLargestF16 = 65504.0f;

CKDIST_INLINE Vec load_lanes(const float* x, int lanes) { return lanes < kLanes ? load_n(x, lanes) : load(x); }

// NaN stays NaN.
CKDIST_INLINE Vec clamp(Vec x, float limit) { return max(set(-limit), min(set(limit), x)); }

// codes[i * step] = lanes[i]. The codes of a key are 16 elements apart, those of a value are consecutive.
template <class Code>
CKDIST_INLINE void lay_out(const Code* lanes, int n, int64_t step, Code* codes) {
  for (int i = 0; i < n; ++i) codes[i * step] = lanes[i];
}

void write_f32(const float* x, int head_dim, int64_t step, float* tile) { lay_out(x, head_dim, step, tile); }

// Large finite numbers stay finite, or one large key would turn a whole row of scores into NaN.
void write_f16(const float* x, int head_dim, int64_t step, uint16_t* tile) {
  for (int i = 0; i < head_dim; i += kLanes) {
    const int n = head_dim - i < kLanes ? head_dim - i : kLanes;
    uint16_t lanes[kLanes];
    store_f16(lanes, clamp(load_lanes(x + i, n), kLargestF16));
    lay_out(lanes, n, step, tile + i * step);
  }
}

void write_bf16(const float* x, int head_dim, int64_t step, uint16_t* tile) {
  for (int i = 0; i < head_dim; ++i) tile[i * step] = bf16_of_float(x[i]);
}

// Codes of q8_0, or halves of bytes of q4_0. Codes are relative to the stored scale, after its rounding to float16.
// scales: one for each group, 16 apart. Returns false if any x is NaN or infinite.
bool quantise_small(KvType type, const float* x, int head_dim, int group, int8_t* codes, uint16_t* scales) {
  const bool nibbles = type == KvType::q4_0;
  bool finite = true;
  for (int start = 0, end; start < head_dim; start += group) {
    end = start + group < head_dim ? start + group : head_dim;
    Vec largest = set(0.0f), probe = set(0.0f);
    for (int i = start; i < end; i += kLanes) {
      const Vec a = load_lanes(x + i, end - i);
      largest = max(largest, abs(a));
      probe = fma(a, set(0.0f), probe);
    }
    finite = finite && reduce_sum(probe) == 0.0f;
    const float ideal = reduce_max(largest) / (nibbles ? 16.0f : 127.0f);
    const uint16_t scale = to_f16(ideal > kLargestF16 ? kLargestF16 : ideal);
    const float stored = from_f16(scale);
    const float inverse = stored > 0.0f ? 1.0f / stored : 0.0f;
    for (int i = start; i < end; i += kLanes) {
      const int n = end - i < kLanes ? end - i : kLanes;
      int8_t lanes[kLanes];
      const Vec a = load_lanes(x + i, n);
      if (nibbles) store_i8(lanes, max(set(-8.0f), min(set(7.0f), fma(a, set(0.5f * inverse), set(-0.5f)))));
      else store_i8(lanes, clamp(a * set(inverse), 127.0f));
      std::memcpy(codes + i, lanes, n);
    }
    scales[start / group * kBlockTokens] = scale;
  }
  return finite;
}

// A byte of two halves.
CKDIST_INLINE uint8_t pack(int8_t low, int8_t high) { return static_cast<uint8_t>((low & 15) | (high & 15) << 4); }

void lay_out_key_halves(const int8_t* k, int slot, int width, uint8_t* tile) {
  for (int i = 0; i < width; i += 2) tile[i / 2 * kBlockTokens + slot] = pack(k[i], k[i + 1]);
}

void lay_out_value_halves(const int8_t* v, int slot, int width, uint8_t* tile) {
  uint8_t* value = tile + slot / 2 * width;
  const int shift = slot % 2 * 4, other = 0xf0 >> shift;
  for (int i = 0; i < width; ++i) value[i] = static_cast<uint8_t>((value[i] & other) | (v[i] & 15) << shift);
}

// Writes the codes of a key to a block: pairs of neighbouring dimensions.
template <class Code>
void lay_out_key(const Code* k, int slot, int width, uint8_t* tile) {
  Code* key = reinterpret_cast<Code*>(tile) + 2 * slot;
  for (int i = 0; i < width; i += 2) std::memcpy(key + i * kBlockTokens, k + i, 2 * sizeof(Code));
}

// Writes the codes of a value to a block: pairs of positions.
template <class Code>
void lay_out_value(const Code* v, int slot, int width, uint8_t* tile) {
  using Pair = std::conditional_t<sizeof(Code) == 2, uint32_t, uint16_t>;
  using Bits = std::make_unsigned_t<Code>;
  constexpr int bits = 8 * sizeof(Code);
  Pair* value = reinterpret_cast<Pair*>(tile) + slot / 2 * width;
  // Whole pairs are written, with the other half unchanged: this vectorises, and writing every second code does
  // not.
  const int shift = slot % 2 * bits;
  const Pair other = static_cast<Pair>(static_cast<Pair>(static_cast<Bits>(-1)) << (bits - shift));
  for (int i = 0; i < width; ++i)
    value[i] = static_cast<Pair>((value[i] & other) | static_cast<Pair>(static_cast<Bits>(v[i])) << shift);
}

constexpr int kMostDimensions = 4096;

int64_t element_bytes(KvType type) { return code_bytes(type, 2) / 2; }

void write_plain(KvType type, const float* x, int width, int64_t step, uint8_t* tile) {
  if (type == KvType::f32) return write_f32(x, width, step, reinterpret_cast<float*>(tile));
  if (type == KvType::f16) return write_f16(x, width, step, reinterpret_cast<uint16_t*>(tile));
  write_bf16(x, width, step, reinterpret_cast<uint16_t*>(tile));
}

// Returns false if any x is NaN or infinite and the type has no code for it. scales: those of the position. The first
// `values` elements are also values.
bool store_key(KvType type, const float* x, int slot, int width, int group, int values, uint8_t* tile,
               uint8_t* scales) {
  if (is_small(type)) {
    int8_t codes[kMostDimensions];
    const bool finite = quantise_small(type, x, width, group, codes, reinterpret_cast<uint16_t*>(scales) + slot);
    type == KvType::q4_0 ? lay_out_key_halves(codes, slot, width, tile) : lay_out_key(codes, slot, width, tile);
    return finite;
  }
  if (type == KvType::i16) {
    int16_t codes[kMostDimensions];
    float* scale = reinterpret_cast<float*>(scales) + slot;
    bool finite = true;
    for (int start = 0; start < width; start += group, scale += kBlockTokens) {
      const int n = start + group < width ? group : width - start;
      *scale = quantise(x + start, n, start < values ? kLargestValue : kLargestCode, kLongest, codes + start);
      finite = finite && *scale == *scale;
    }
    lay_out_key(codes, slot, width, tile);
    return finite;
  }
  write_plain(type, x, width, kBlockTokens, tile + element_bytes(type) * slot);
  return true;
}

bool store_value(KvType type, const float* x, int slot, int width, int group, uint8_t* tile, uint8_t* scales) {
  if (is_small(type)) {
    int8_t codes[kMostDimensions];
    const bool finite = quantise_small(type, x, width, group, codes, reinterpret_cast<uint16_t*>(scales) + slot);
    type == KvType::q4_0 ? lay_out_value_halves(codes, slot, width, tile) : lay_out_value(codes, slot, width, tile);
    return finite;
  }
  if (type == KvType::i16) {
    int16_t codes[kMostDimensions];
    float& scale = reinterpret_cast<float*>(scales)[slot];
    scale = quantise(x, width, kLargestValue, __builtin_inff(), codes);
    lay_out_value(codes, slot, width, tile);
    return scale == scale;
  }
  write_plain(type, x, width, 1, tile + element_bytes(type) * slot * width);
  return true;
}

}  // namespace

int64_t attention_block_bytes(const CacheShape& cache) { return BlockLayout(cache).bytes; }

// A NaN or infinity in a key or value must show in every query that sees the position: through the scale of the key, or
// through the key itself if keys are floats.
void attention_store(const CacheShape& cache, uint8_t* block, int slot, const float* k, const float* v) {
  const BlockLayout layout(cache);
  float key[kMostDimensions], value[kMostDimensions];
  if (is_rotated(cache.key_type)) {
    k = static_cast<const float*>(std::memcpy(key, k, 4 * cache.key_width));
    rotate_key(cache, key);
  }
  if (!cache.latent && is_rotated(cache.value_type)) {
    v = static_cast<const float*>(std::memcpy(value, v, 4 * cache.value_width));
    rotate_blocks(value, cache.value_width);
  }
  bool finite = store_key(cache.key_type, k, slot, cache.key_width, layout.k_group,
                          cache.latent ? cache.value_width : 0, block, block + layout.k_scales_offset);
  if (!cache.latent)
    finite &= store_value(cache.value_type, v, slot, cache.value_width, layout.v_group, block + layout.v_offset,
                          block + layout.v_scales_offset);
  if (finite) return;
  if (is_small(cache.key_type)) reinterpret_cast<uint16_t*>(block + layout.k_scales_offset)[slot] = 0x7e00;
  else if (cache.key_type == KvType::i16)
    reinterpret_cast<float*>(block + layout.k_scales_offset)[slot] = __builtin_nanf("");
  else {
    const float nan = __builtin_nanf("");
    write_plain(cache.key_type, &nan, 1, 1, block + element_bytes(cache.key_type) * slot);
  }
}

// Keys and values of i16 are converted together, and a block is written in whole cache lines.
void attention_store_block(const CacheShape& cache, uint8_t* block, const float* const* k, const float* const* v) {
  constexpr int kMostWidth = 512;
  const int key_width = cache.key_width, value_width = cache.value_width;
  const bool words = cache.key_type == KvType::i16 && cache.value_type == KvType::i16;
  if (!words || cache.latent || key_width > kMostWidth || value_width > kMostWidth) {
    for (int slot = 0; slot < kBlockTokens; ++slot) attention_store(cache, block, slot, k[slot], v[slot]);
    return;
  }
  const BlockLayout layout(cache);
  alignas(64) int16_t codes[kBlockTokens * kMostWidth];
  float* const k_scales = reinterpret_cast<float*>(block + layout.k_scales_offset);
  float* const v_scales = reinterpret_cast<float*>(block + layout.v_scales_offset);
  quantise_rows([&](int slot) { return k[slot]; }, kBlockTokens, key_width, kLargestCode, kLongest, codes, key_width,
                k_scales);
  move_to_lanes(codes, key_width, reinterpret_cast<int16_t*>(block));
  quantise_rows([&](int slot) { return v[slot]; }, kBlockTokens, value_width, kLargestValue, __builtin_inff(), codes,
                value_width, v_scales);
  uint32_t* pairs = reinterpret_cast<uint32_t*>(block + layout.v_offset);
  for (int slot = 0; slot < kBlockTokens; slot += 2, pairs += value_width) {
    const int16_t *first = codes + slot * value_width, *second = first + value_width;
    for (int i = 0; i < value_width; ++i)
      pairs[i] = static_cast<uint16_t>(first[i]) | uint32_t{static_cast<uint16_t>(second[i])} << 16;
  }
  for (int slot = 0; slot < kBlockTokens; ++slot)
    if (v_scales[slot] != v_scales[slot]) k_scales[slot] = v_scales[slot];
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
