// Scaled products of rows with the matrices A of their adapters (LoRA). The linear step after it multiplies them with
// B.
#include <algorithm>

#include "runtime/steps/low_rank.h"

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

const RegisteredKind<Adapt> kKind(ckdist_step_adapt);

}  // namespace
}  // namespace ckdist
