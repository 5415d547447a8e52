#include "kernels/layout_blocks.h"

#include <cstring>

#include "kernels/half.h"
#include "kernels/interleaved.h"

namespace ckdist {
namespace {

uint16_t read16(const uint8_t* p) { return read_as<uint16_t>(p); }

uint32_t read32(const uint8_t* p) { return read_as<uint32_t>(p); }

constexpr uint16_t kSignBit = 0x8000;  // ggml's 32-column types add their minimum; a Block subtracts it

// 32 codes from 16 bytes: columns 0..15 are the low nibbles.
void read_nibbles(const uint8_t* source, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = source[i] & 0x0f;
    codes[i + 16] = source[i] >> 4;
  }
}

// Bit i of `bits` becomes bit 4 of code i, eight codes in a word: each byte of the word keeps its own bit of a copy,
// and adding 0x7f carries any other bit to the top bit.
void add_fifth_bits(uint32_t bits, uint8_t* codes) {
  constexpr uint64_t ones = 0x0101010101010101u, low7 = 0x7f * ones;
  for (int i = 0; i < 4; ++i) {
    const uint64_t own = (bits >> (8 * i) & 0xff) * ones & 0x8040201008040201u;
    const uint64_t top = (((own & low7) + low7) | own) & 0x80 * ones;
    uint64_t word = read_as<uint64_t>(codes + 8 * i);
    word |= top >> 3;
    std::memcpy(codes + 8 * i, &word, sizeof word);
  }
}

// 256 codes from 128 bytes: of every 64 columns, the first 32 are the low nibbles.
void read_nibbles_k(const uint8_t* source, uint8_t* codes) {
  for (int chunk = 0; chunk < 4; ++chunk, source += 32, codes += 64)
    for (int i = 0; i < 32; ++i) {
      codes[i] = source[i] & 0x0f;
      codes[i + 32] = source[i] >> 4;
    }
}

// 256 codes from 64 bytes: of every 128 columns, the first 32 are bits 0 and 1, the next 32 are bits 2 and 3, and so
// on.
void read_crumbs_k(const uint8_t* source, uint8_t* codes) {
  for (int half = 0; half < 2; ++half)
    for (int part = 0; part < 4; ++part)
      for (int i = 0; i < 32; ++i) codes[128 * half + 32 * part + i] = source[32 * half + i] >> (2 * part) & 3;
}

// Eight 6-bit scales and minima from 12 bytes: the first four are in the low bits; the others are split into nibbles
// and top bits.
void read_scales_k4(const uint8_t* source, Block& block) {
  for (int i = 0; i < 4; ++i) {
    block.scales[i] = source[i] & 63;
    block.minima[i] = source[i + 4] & 63;
    block.scales[i + 4] = (source[i + 8] & 0x0f) | (source[i] >> 6) << 4;
    block.minima[i + 4] = source[i + 8] >> 4 | (source[i + 4] >> 6) << 4;
  }
}

}  // namespace

template <>
void read_block<Type::q4_0>(const uint8_t* source, Block& block) {
  block.scale = read16(source);
  read_nibbles(source + 2, block.codes);
}

template <>
void read_block<Type::q4_1>(const uint8_t* source, Block& block) {
  block.scale = read16(source);
  block.minimum = read16(source + 2) ^ kSignBit;
  read_nibbles(source + 4, block.codes);
}

template <>
void read_block<Type::q5_0>(const uint8_t* source, Block& block) {
  block.scale = read16(source);
  read_nibbles(source + 6, block.codes);
  add_fifth_bits(read32(source + 2), block.codes);
}

template <>
void read_block<Type::q5_1>(const uint8_t* source, Block& block) {
  block.scale = read16(source);
  block.minimum = read16(source + 2) ^ kSignBit;
  read_nibbles(source + 8, block.codes);
  add_fifth_bits(read32(source + 4), block.codes);
}

template <>
void read_block<Type::q8_0>(const uint8_t* source, Block& block) {
  block.scale = read16(source);
  for (int i = 0; i < 32; ++i) block.codes[i] = source[i + 2] ^ 0x80;
}

template <>
void read_block<Type::iq4_nl>(const uint8_t* source, Block& block) {
  read_block<Type::q4_0>(source, block);
}

template <>
void read_block<Type::mxfp4>(const uint8_t* source, Block& block) {
  block.scales[0] = source[0];
  read_nibbles(source + 1, block.codes);
}

template <>
void read_block<Type::int4_32>(const uint8_t* source, Block& block) {
  read_block<Type::q4_0>(source, block);
}

template <>
void read_block<Type::int4_32z>(const uint8_t* source, Block& block) {
  block.word = read32(source);
  read_nibbles(source + 4, block.codes);
}

template <>
void read_block<Type::int4_128z>(const uint8_t* source, Block& block) {
  read_block<Type::int4_32z>(source, block);
}

template <>
void read_block<Type::nvfp4>(const uint8_t* source, Block& block) {
  block.word = read32(source);
  std::memcpy(block.scales, source + 4, 2);
  read_nibbles(source + 6, block.codes);
}

template <>
void read_block<Type::f8_e4m3>(const uint8_t* source, Block& block) {
  block.word = read32(source);
  std::memcpy(block.codes, source + 4, 32);
}

template <>
void read_block<Type::f8_e4m3_32>(const uint8_t* source, Block& block) {
  read_block<Type::f8_e4m3>(source, block);
}

template <>
void read_block<Type::q2_k>(const uint8_t* source, Block& block) {
  std::memcpy(block.scales, source, 16);
  read_crumbs_k(source + 16, block.codes);
  block.scale = read16(source + 80);
  block.minimum = read16(source + 82);
}

template <>
void read_block<Type::q3_k>(const uint8_t* source, Block& block) {
  read_crumbs_k(source + 32, block.codes);
  for (int part = 0; part < 8; ++part)
    for (int i = 0; i < 32; ++i) block.codes[32 * part + i] |= (source[i] >> part & 1) << 2;
  const uint8_t* packed = source + 96;
  for (int i = 0; i < 16; ++i) {
    const int low = packed[i % 8] >> (i / 8 * 4) & 0x0f;
    const int high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
    block.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  block.scale = read16(source + 108);
}

template <>
void read_block<Type::q4_k>(const uint8_t* source, Block& block) {
  block.scale = read16(source);
  block.minimum = read16(source + 2);
  read_scales_k4(source + 4, block);
  read_nibbles_k(source + 16, block.codes);
}

template <>
void read_block<Type::q5_k>(const uint8_t* source, Block& block) {
  block.scale = read16(source);
  block.minimum = read16(source + 2);
  read_scales_k4(source + 4, block);
  read_nibbles_k(source + 48, block.codes);
  for (int part = 0; part < 8; ++part)
    for (int i = 0; i < 32; ++i) block.codes[32 * part + i] |= (source[16 + i] >> part & 1) << 4;
}

template <>
void read_block<Type::q6_k>(const uint8_t* source, Block& block) {
  for (int half = 0; half < 2; ++half)
    for (int part = 0; part < 4; ++part) {
      const uint8_t* low = source + 64 * half + 32 * (part % 2);
      const uint8_t* high = source + 128 + 32 * half;
      uint8_t* codes = block.codes + 128 * half + 32 * part;
      for (int i = 0; i < 32; ++i) codes[i] = (low[i] >> (part / 2 * 4) & 0x0f) | (high[i] >> (2 * part) & 3) << 4;
    }
  std::memcpy(block.scales, source + 192, 16);
  block.scale = read16(source + 208);
}

template <>
void read_block<Type::iq4_xs>(const uint8_t* source, Block& block) {
  block.scale = read16(source);
  const int high = read16(source + 2);
  for (int i = 0; i < 8; ++i) {
    const int low = source[4 + i / 2] >> (i % 2 * 4) & 0x0f;
    block.scales[i] = static_cast<uint8_t>((low | (high >> (2 * i) & 3) << 4) - 32);
  }
  for (int i = 0; i < 8; ++i) read_nibbles(source + 8 + 16 * i, block.codes + 32 * i);
}

template <Type type>
void block_values(const Block& block, float* out) {
  constexpr BlockLayout layout = layout_of(type);
  const int columns = type_traits(type).block_elements;
  if constexpr (is_float8(type)) {
    for (int i = 0; i < columns; ++i) out[i] = float_of_bits(block.word) * float_of_e4m3(block.codes[i]);
    return;
  }
  if constexpr (layout.scales == ScaleKind::zeroed) {
    for (int i = 0; i < columns; ++i)
      out[i] =
          float_of_bits(block.word & ~kZeroPoint) * static_cast<float>(block.codes[i] - int(block.word & kZeroPoint));
    return;
  }
  const float block_scale = layout.scales == ScaleKind::exponent ? float_of_exponent(block.scales[0])
                            : layout.scales == ScaleKind::bfloat ? float_of_bf16(block.scale)
                            : layout.scales == ScaleKind::float8 ? float_of_bits(block.word)
                                                                 : float_of_half(block.scale);
  const float block_minimum = layout.minimum ? float_of_half(block.minimum) : 0;
  for (int start = 0; start < columns; start += layout.group) {
    const int group = start / layout.group;
    float scale = block_scale, minimum = block_minimum;
    if (layout.scales == ScaleKind::unsigned_byte) scale *= block.scales[group], minimum *= block.minima[group];
    if (layout.scales == ScaleKind::expanded) scale *= interleaved_of(type).unit * block.scales[group];
    if (layout.scales == ScaleKind::float8) scale *= float_of_shifted_scale(block.scales[group]);
    if (layout.scales == ScaleKind::signed_byte) scale *= static_cast<int8_t>(block.scales[group]);
    if (layout.scales == ScaleKind::nibbles) scale *= block.scales[group] & 0x0f, minimum *= block.scales[group] >> 4;
    for (int i = start; i < start + layout.group; ++i) {
      const int code = layout.codebook ? codebook_of(type)[block.codes[i]] : block.codes[i];
      const float value = scale * static_cast<float>(code - layout.offset);
      out[i] = layout.minimum ? value - minimum : value;
    }
  }
}

namespace {

template <Type type>
void dequantize_row(const uint8_t* source, int64_t cols, float* out) {
  constexpr BlockLayout layout = layout_of(type);
  static_assert(layout.columns > 0, "a block type");
  const TypeTraits& traits = type_traits(type);
  Block block;
  for (int64_t column = 0; column < cols; column += traits.block_elements, source += traits.block_bytes) {
    read_block<type>(source, block);
    block_values<type>(block, out + column);
  }
}

template <>
void dequantize_row<Type::f32>(const uint8_t* source, int64_t cols, float* out) {
  std::memcpy(out, source, static_cast<size_t>(cols) * sizeof(float));
}

template <>
void dequantize_row<Type::f16>(const uint8_t* source, int64_t cols, float* out) {
  for (int64_t i = 0; i < cols; ++i) out[i] = float_of_half(read16(source + 2 * i));
}

template <>
void dequantize_row<Type::bf16>(const uint8_t* source, int64_t cols, float* out) {
  for (int64_t i = 0; i < cols; ++i) out[i] = float_of_bf16(read16(source + 2 * i));
}

}  // namespace

DequantizeRow dequantize_row_of(Type type) {
  switch (type) {
#define CKDIST_ROW(name) \
  case Type::name: return dequantize_row<Type::name>;
    CKDIST_EACH_TYPE(CKDIST_ROW)
#undef CKDIST_ROW
  }
  return nullptr;
}

#define CKDIST_INSTANTIATE(name) template void block_values<Type::name>(const Block&, float*);
CKDIST_EACH_BLOCK_TYPE(CKDIST_INSTANTIATE)
#undef CKDIST_INSTANTIATE

}  // namespace ckdist
