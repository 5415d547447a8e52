// Steps of adapters: in serving, scaled products of rows with the matrices A of their adapters (LoRA), which the linear
// step after it multiplies with B; in training, LoRA's dropout, and the magnitudes of DoRA.
#include "core/mixed.h"
#include "runtime/steps/low_rank.h"
#include "runtime/training.h"

namespace ckdist {
namespace {

constexpr int64_t kMostRows = 64;  // rows at a time
constexpr int64_t kTogether = 16;  // products of single rows at a time

struct Adapt : InferenceRun<ckdist_adapt_step> {
  void run() {
    const int64_t n = r.rows(step.step);
    const int64_t each = std::clamp<int64_t>((n + r.active() - 1) / r.active(), 1, kMostRows);
    const int64_t blocks = (n + each - 1) / each;
    r.take_items(thread, index, blocks * step.count, [&](int64_t item) {
      const int64_t begin = item / step.count * each;
      multiply(step.products[item % step.count], {begin, std::min(begin + each, n)});
    });
    r.finish(thread, index, step.products[0].out, n);
  }

  void multiply(const ckdist_product& p, Range rows) {
    const int64_t x_stride = r.value(p.x.first).stride;
    const uint8_t* const x = r.activations(thread, step.step, p.x.first);
    TileProduct few[kTogether] = {};
    float factors[kTogether];
    int64_t count = 0, cols = 0;
    bool halves = false;
    const auto flush = [&] {
      r.kernels.low_rank.multiply(halves, few, count, cols);
      for (int64_t i = 0; i < count; i++) scale(few[i].y, kTileRows, factors[i]);
      count = 0;
    };
    r.each_adapter(step.step, rows, [&](int adapter, int64_t list, Range some) {
      const Weight& weight = r.weight(p.weight.first + adapter);
      const Matrix& a = weight.matrix;
      if (a.rows == 0 || a.cols == 0) return;
      const FloatRows y = r.low_rank(p.out, list);
      const auto factor = [&](int64_t row) { return float(weight.scale * r.adapter(step.step, list, row).scale); };
      if (some.end - some.begin > LowRankSum::kSingleRows) {
        r.multiply(thread, a, x + some.begin * x_stride, x_stride, some.end - some.begin, y.row(some.begin), y.stride);
        for (int64_t row = some.begin; row < some.end; row++) scale(y.row(row), a.rows, factor(row));
        return;
      }
      if (halves != (a.type == Type::f16)) flush();
      halves = a.type == Type::f16, cols = a.cols;
      for (int64_t row = some.begin; row < some.end; row++)
        for (int64_t tile = 0; tile < a.tile_count(); tile++) {
          factors[count] = factor(row);
          few[count++] = {a.tiles + tile * a.tile_bytes, reinterpret_cast<const float*>(x + row * x_stride),
                          y.row(row) + tile * kTileRows};
          if (count == kTogether) flush();
        }
    });
    flush();
  }

  static void scale(float* values, int64_t count, float factor) {
    if (factor == 1.f) return;
    for (int64_t i = 0; i < count; i++) values[i] *= factor;
  }
};

struct Dropout : TokenRun<Dropout, ckdist_dropout_step> {
  void token(int64_t t) {
    const int64_t n = r.width(step.out);
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

struct Magnitude : TokenRun<Magnitude, ckdist_magnitude_step> {
  void token(int64_t t) {
    const int64_t n = r.width(step.out);
    const float* const norms = r.floats(step.norms, 0);
    const float* const magnitude = step.magnitude < 0 ? nullptr : r.parameter(step.magnitude);
    const float* const bias = step.bias < 0 ? nullptr : r.parameter(step.bias);
    const float* const x = r.read(step.x, t, row_buffer(0));
    const float* const by = step.by < 0 ? nullptr : r.read(step.by, t, row_buffer(1));
    float* const out = r.write(step.out, t, row_buffer(3));
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * ((magnitude ? magnitude[i] : 1.f) / norms[i]);
    if (by)
      for (int64_t i = 0; i < n; ++i) out[i] *= by[i];
    if (bias) r.kernels.elementwise.add(bias, n, out);
    r.written(step.out, t, out);
  }
};

const RegisteredKind<Adapt> kAdapt(ckdist_step_adapt);
const RegisteredKind<Dropout> kDropout(ckdist_step_dropout);
const RegisteredKind<RowNorms> kRowNorms(ckdist_step_row_norms);
const RegisteredKind<Magnitude> kMagnitude(ckdist_step_magnitude);

}  // namespace
}  // namespace ckdist
