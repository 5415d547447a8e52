// Per-layer embeddings: each token's row of a table that stays in its file, and a projection of the token's embedding.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct LayerInputs : Carved<LayerInputs, InferenceRun<ckdist_layer_inputs_step>> {
  // Buffers of one thread: the packed row, the row in float32, and a normed part of x.
  struct Room {
    uint8_t* tile;
    float *row, *part;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const Matrix& table = r.matrix(step.table);
    return {c.bytes(table.tile_bytes), c.floats(table.cols), c.floats(r.value(step.out.first).width)};
  }

  const Matrix& table() const { return r.matrix(step.table); }
  int64_t row_of(int64_t t) const {
    const int64_t id = r.batch.token_ids[r.first_token + t];
    return id >= 0 && id < table().rows ? id : 0;
  }

  void run() {
    const StoredMatrix& stored = r.weight(step.table).sliced->stored();
    each_row(r.local_tokens, [&](int64_t t) { stored.will_need_row(row_of(t)); });
    each_row(r.local_tokens, [&](int64_t t) { make(stored, t); });
    r.meet(thread, index, true, [&](Idle) { stored.source().file().check(); });
  }

  void make(const StoredMatrix& stored, int64_t t) {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const auto [tile, row, part] = buffers();
    stored.pack_row(row_of(t), tile);
    r.kernels.linear[int(table().type)].unpack_row(tile, 0, table().cols, row);
    const int64_t stride = r.value(step.out.first).width;
    const float* const x = r.floats(step.x).row(t);
    for (int l = 0; l < step.out.count; l++) {
      float* const out = r.floats(step.out.first + l).row(t);
      scaled(x + l * stride, step.x_factor, stride, part);
      k.rms_norm(part, r.vector(step.norm), step.eps, stride, part);
      for (int64_t i = 0; i < stride; i++) out[i] = (part[i] + row[l * stride + i] * step.row_factor) * step.factor;
    }
  }
};

const RegisteredKind<LayerInputs> kKind(ckdist_step_layer_inputs);

}  // namespace
}  // namespace ckdist
