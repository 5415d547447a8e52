// One token's activations as float32, bfloat16 or int8 with a scale per 32 columns.
#include "kernels/isa/activations.h"

#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Columns outside [lead, lead + n) are zero.
struct Columns {
  const float* x;
  int64_t n, lead;
  float operator[](int64_t column) const { return column >= lead && column < lead + n ? x[column - lead] : 0.0f; }
};

void prepare_q8(const Columns& x, int64_t padded, int8_t* codes, float* scales, int32_t* sums) {
  for (int64_t start = 0; start < padded; start += 32) {
    float largest = 0.0f;
    for (int64_t i = start; i < start + 32; ++i) {
      const float magnitude = __builtin_fabsf(x[i]);
      largest = magnitude > largest ? magnitude : largest;
    }
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    scales[start / 32] = largest / 127.0f;
    sums[start / 16] = sums[start / 16 + 1] = 0;
    for (int64_t i = start; i < start + 32; ++i) {
      codes[i] = static_cast<int8_t>(__builtin_lrintf(x[i] * inverse));
      sums[i / 16] += codes[i];
    }
  }
}

}  // namespace

void prepare_activations(ActivationFormat format, const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row) {
  const Columns columns{x, n, lead};
  const int64_t padded = ActivationRow::padded(cols);
  if (format == ActivationFormat::q8) {
    prepare_q8(columns, padded, reinterpret_cast<int8_t*>(row), const_cast<float*>(ActivationRow::scales(row, cols)),
               const_cast<int32_t*>(ActivationRow::sums(row, cols)));
    return;
  }
  for (int64_t i = 0; i < padded; ++i) {
    if (format == ActivationFormat::f32)
      reinterpret_cast<float*>(row)[i] = columns[i];
    else
      reinterpret_cast<uint16_t*>(row)[i] = to_bf16(columns[i]);
  }
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
