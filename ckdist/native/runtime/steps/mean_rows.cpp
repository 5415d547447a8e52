// The mean of the hidden states of each sequence, for heads that read one row per sequence.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct MeanRows : StepRun<Inference, ckdist_mean_rows_step> {
  // Buffers of one thread: the sums and a row, each (hidden,).
  struct Room {
    double* sum;
    float* row;
  };
  static Room room(Carver& c, int64_t width) {
    double* const sum = reinterpret_cast<double*>(c.bytes(width * int64_t{sizeof(double)}));
    return {sum, c.floats(width)};
  }
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    Carver c;
    room(c, r.value(step.y).width);
    return c.used;
  }

  void run() {
    int64_t token = 0, row = 0;
    for (int64_t s = 0; s < r.batch.sequences; s++) {
      token += r.batch.chunks[s].tokens;
      const int64_t first = row;
      while (row < r.batch.selected && r.batch.selected_tokens[row] < token) row++;
      if (s % r.active() == thread && row > first) average(first, row);
    }
    r.finish(thread, index, step.out, r.rows(step.step));
  }

  void average(int64_t first, int64_t last) {
    const int64_t width = r.value(step.y).width;
    Carver c{r.memory(thread)};
    const auto [sum, place] = room(c, width);
    const Residual residual = Residual::of(r, thread, step, place);
    std::fill(sum, sum + width, 0.0);
    for (int64_t row = first; row < last; row++) {
      const float* const s = normed(r, step, residual.read(row, r.token_row(step.step, row)), width, place);
      for (int64_t i = 0; i < width; i++) sum[i] += double(s[i]);
    }
    int64_t stride;
    float* const out = r.floats(step.out, &stride);
    for (int64_t row = first; row < last; row++)
      for (int64_t i = 0; i < width; i++) out[row * stride + i] = float(sum[i] / double(last - first));
  }
};

const RegisteredKind<MeanRows> kKind(ckdist_step_mean_rows);

}  // namespace
}  // namespace ckdist
