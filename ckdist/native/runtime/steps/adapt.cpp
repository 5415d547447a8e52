// Products of rows with the matrices A of their adapters (LoRA). The linear step after it multiplies them with B.
#include <algorithm>
#include <utility>

#include "runtime/steps/low_rank.h"

namespace ckdist {
namespace {

constexpr int64_t kMostRows = 64;  // rows at a time
constexpr int64_t kTogether = 16;  // products of single rows at a time

struct Adapt : StepRun<Inference, ckdist_adapt_step> {
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
    int64_t stride;
    float* const y = r.floats(p.out, &stride);
    TileProduct few[kTogether];
    int64_t count = 0, cols = 0;
    bool halves = false;
    const auto flush = [&] { r.kernels.low_rank.multiply(halves, few, std::exchange(count, 0), cols); };
    r.each_adapter(step.step, rows, [&](int adapter, Range some) {
      const Matrix& a = r.matrix(p.weight.first + adapter);
      if (a.rows == 0 || a.cols == 0) return;
      if (some.end - some.begin > LowRankSum::kSingleRows)
        return r.multiply(thread, a, x + some.begin * x_stride, x_stride, some.end - some.begin,
                          y + some.begin * stride, stride);
      if (halves != (a.type == Type::f16)) flush();
      halves = a.type == Type::f16, cols = a.cols;
      for (int64_t row = some.begin; row < some.end; row++)
        for (int64_t tile = 0; tile < a.tile_count(); tile++) {
          few[count++] = {a.tiles + tile * a.tile_bytes, reinterpret_cast<const float*>(x + row * x_stride),
                          y + row * stride + tile * kTileRows};
          if (count == kTogether) flush();
        }
    });
    flush();
  }
};

const RegisteredKind<Adapt> kKind(ckdist_step_adapt);

}  // namespace
}  // namespace ckdist
