// Writing keys and values into blocks of the KV cache: rounding to the cache's type, and the scales of q8_0.
#include "kernels/isa/attention_store.h"

#include "kernels/isa/attention_block.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr float kLargestF16 = 65504.0f;

// Finite numbers stay finite, or one large key would turn a whole row of scores into NaN. NaN stays NaN.
uint16_t saturate_f16(float x) {
  if (x > kLargestF16) x = kLargestF16;
  if (x < -kLargestF16) x = -kLargestF16;
  return to_f16(x);
}

// Writes x[i] at element i * step of a tile.
void store_plain(KvType type, const float* x, int head_dim, int64_t step, uint8_t* tile) {
  for (int i = 0; i < head_dim; ++i) {
    if (type == KvType::f32)
      reinterpret_cast<float*>(tile)[i * step] = x[i];
    else
      reinterpret_cast<uint16_t*>(tile)[i * step] = type == KvType::f16 ? saturate_f16(x[i]) : to_bf16(x[i]);
  }
}

// Codes are relative to the scale as it is stored, after its rounding to float16.
void store_q8(const float* x, int head_dim, int group, int64_t step, int8_t* codes, uint16_t* scales) {
  for (int start = 0; start < head_dim; start += group) {
    float largest = 0.0f, probe = 0.0f;  // probe: NaN if any is NaN or infinite, so that bad numbers stay visible
    for (int i = start; i < start + group; ++i) {
      const float magnitude = __builtin_fabsf(x[i]);
      largest = magnitude > largest ? magnitude : largest;
      probe += x[i] * 0.0f;
    }
    const uint16_t scale = saturate_f16(largest / 127.0f + probe);
    const float stored = from_f16(scale);
    const float inverse = stored > 0.0f ? 1.0f / stored : 0.0f;
    for (int i = start; i < start + group; ++i) {
      float code = x[i] * inverse;
      code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
      codes[i * step] = static_cast<int8_t>(code == code ? __builtin_lrintf(code) : 0);
    }
    scales[start / group * kBlockTokens] = scale;
  }
}

}  // namespace

int64_t attention_block_bytes(KvType type, int head_dim) { return BlockLayout(type, head_dim).bytes; }

void attention_store(KvType type, uint8_t* block, int slot, int head_dim, const float* k, const float* v) {
  const BlockLayout layout(type, head_dim);
  uint8_t* key = block + code_bytes(type) * slot;
  uint8_t* value = block + layout.v_offset + code_bytes(type) * slot * head_dim;
  if (type == KvType::q8_0) {
    store_q8(k, head_dim, layout.group, kBlockTokens, reinterpret_cast<int8_t*>(key),
             reinterpret_cast<uint16_t*>(block + layout.k_scales_offset) + slot);
    store_q8(v, head_dim, layout.group, 1, reinterpret_cast<int8_t*>(value),
             reinterpret_cast<uint16_t*>(block + layout.v_scales_offset) + slot);
    return;
  }
  store_plain(type, k, head_dim, kBlockTokens, key);
  store_plain(type, v, head_dim, 1, value);
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
