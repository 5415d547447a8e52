// Row-wise kernels of training that read and write values as they are stored between steps: rows of floats or of
// bfloat16.
#pragma once
#include <cstdint>

#include "kernels/elementwise.h"

namespace ckdist {

struct Row {
  uint8_t* at;
  bool narrow;  // bfloat16, else float32
};

// The angles of one position.
struct Rope {
  const float* cos;  // (dims / 2,)
  const float* sin;
  int64_t dims;
  bool interleaved;  // neighbours are paired, else halves
};

struct RowKernel {
  // out[i] = f(gate[i]) * up[i].
  void (*gated)(GateFunction function, Row gate, Row up, int64_t n, Row out);
  // d_gate = dy * up * f'(gate), d_up = dy * f(gate).
  void (*gated_grad)(GateFunction function, Row gate, Row up, Row dy, int64_t n, Row d_gate, Row d_up);
  // Rotates the first dimensions of every head, like ElementwiseKernel's rope and rope_pairs; by the negative angles if
  // `back`. The other dimensions are copied.
  void (*rope)(Row x, const Rope& rope, bool back, int64_t head_dim, int64_t n, Row out);
  float (*dot)(Row x, Row y, int64_t n);
  // out[i] = x[i] * factor.
  void (*scale)(Row x, float factor, int64_t n, Row out);
};

}  // namespace ckdist
