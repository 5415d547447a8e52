// Steps of adapters in training: LoRA's dropout, and the magnitudes of DoRA.
#include <algorithm>
#include <cmath>

#include "core/mixed.h"
#include "runtime/training.h"

namespace ckdist {
namespace {

struct Dropout : TrainingRun<ckdist_dropout_step> {
  void run() {
    const int64_t n = r.width(step.out);
    each_token([&](int64_t t) {
      const float* const x = r.read(step.x, t, row_buffer(0));
      float* const out = r.write(step.out, t, row_buffer(3));
      if (r.batch.keys.empty()) {
        std::copy_n(x, n, out);
      } else {
        const uint32_t row = mixed(r.batch.keys[size_t(t)] ^ step.stream);
        for (int64_t i = 0; i < n; ++i) {
          const bool kept = mixed(row + uint32_t(step.first_column + i) * kHashStep) >= step.least;
          out[i] = kept ? x[i] * step.factor : 0.f;
        }
      }
      r.written(step.out, t, out);
    });
  }
};

// The norms of the rows of W + scale B A. W is unpacked row by row.
struct RowNorms : TrainingRun<ckdist_row_norms_step> {
  static constexpr int64_t kNormRows = 16;  // rows of one item

  void run() {
    const ckdist_parameter& w = r.shape(step.weight);
    const int64_t rank = r.shape(step.a).rows;
    float* const out = r.floats(step.out, 0);
    parallel_for((w.rows + kNormRows - 1) / kNormRows, [&](int64_t item) {
      for (int64_t row = item * kNormRows; row < std::min((item + 1) * kNormRows, w.rows); ++row) {
        float* const sum = row_buffer(1);
        const float* const b = r.parameter(step.b) + row * rank;
        std::copy_n(r.parameter_rows(step.weight, row, 1, row_buffer(0)), w.cols, sum);
        for (int64_t k = 0; k < rank; ++k)
          r.kernels.elementwise.add_scaled(r.parameter(step.a) + k * w.cols, step.scale * b[k], w.cols, sum);
        out[row] = r.kernels.elementwise.sum_squares(sum, w.cols);
      }
    });
    r.meet(thread, index, true, [&](Idle) {
      if (step.summed) r.sum_over_tensor(out, w.rows);
      for (int64_t row = 0; row < w.rows; ++row) out[row] = std::sqrt(out[row]);
    });
  }
};

struct Magnitude : TrainingRun<ckdist_magnitude_step> {
  void run() {
    const int64_t n = r.width(step.out);
    const float* const norms = r.floats(step.norms, 0);
    const float* const magnitude = step.magnitude < 0 ? nullptr : r.parameter(step.magnitude);
    const float* const bias = step.bias < 0 ? nullptr : r.parameter(step.bias);
    each_token([&](int64_t t) {
      const float* const x = r.read(step.x, t, row_buffer(0));
      const float* const by = step.by < 0 ? nullptr : r.read(step.by, t, row_buffer(1));
      float* const out = r.write(step.out, t, row_buffer(3));
      for (int64_t i = 0; i < n; ++i) out[i] = x[i] * ((magnitude ? magnitude[i] : 1.f) / norms[i]);
      if (by)
        for (int64_t i = 0; i < n; ++i) out[i] *= by[i];
      if (bias) r.kernels.elementwise.add(bias, n, out);
      r.written(step.out, t, out);
    });
  }
};

const RegisteredKind<Dropout> kDropout(ckdist_step_dropout);
const RegisteredKind<RowNorms> kRowNorms(ckdist_step_row_norms);
const RegisteredKind<Magnitude> kMagnitude(ckdist_step_magnitude);

}  // namespace
}  // namespace ckdist
