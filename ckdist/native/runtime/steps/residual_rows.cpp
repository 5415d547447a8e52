// Rows of the residual stream that later steps, other ranks and clients read.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

// factor * scalar * (x + post_factor * rms_norm(y)).
struct SumRows : ResidualRun<ckdist_sum_rows_step> {
  void run() {
    const Residual rows = residual();
    const FloatRows out = r.floats(step.out);
    each_row(r.rows(step.step), [&](int64_t row) {
      const float* const s = rows.read(row, r.token_row(step.step, row));
      scaled(s, step.factor, width(), out.row(r.first_row(step.step) + row));
    });
    r.meet(thread, index);
  }
};

// Columns that a pipeline stage sends or receives side by side.
struct CopyColumns : ResidualRun<ckdist_copy_columns_step> {
  void run() {
    const Residual rows = residual();
    const FloatRows out = r.floats(step.out);
    const int64_t n = std::min(width() - step.first, r.value(step.out).width - step.first_out);
    const Range columns = {step.first, step.first + n};
    each_row(r.local_tokens, [&](int64_t row) {
      const float* const s = rows.added(rows.summed(row, row, columns), row, row, columns);
      std::copy_n(s, n, out.row(row) + step.first_out);
    });
    r.meet(thread, index);
  }
};

// The last hidden states of the selected tokens, in memory that all ranks read, if tokens are sharded. Rows have the
// order of the batch's selected tokens, so that every rank finds a row without knowing its owner.
struct GatherRows : ResidualRun<ckdist_gather_rows_step> {
  void run() {
    const Residual rows = residual();
    const FloatRows out = r.floats(step.out);  // (selected, hidden)
    for (int64_t o = thread; o < r.batch.selected; o += r.active()) {
      const int64_t row = r.batch.selected_tokens[o] - r.first_token;
      if (row < 0 || row >= r.local_tokens) continue;
      std::copy_n(rows.read(o - r.first_selected, row), width(), out.row(o));
    }
    r.finish(thread, index, step.out, r.batch.selected);
  }
};

// The hidden states of the selected rows, for requests of embeddings instead of logits.
struct OutputRows : ResidualRun<ckdist_output_rows_step> {
  void run() {
    const Residual rows = residual();
    const FloatRows out = r.floats(step.out);  // (selected, hidden)
    const int64_t n = r.rows(step.step);
    each_row(n, [&](int64_t row) {
      const float* const s = rows.read(row, r.token_row(step.step, row));
      std::copy_n(normed(r, step, s, width(), buffer()), width(), out.row(row));
    });
    r.finish(thread, index, step.out, n);
  }
};

// The mean of the hidden states of each sequence, for heads that read one row per sequence.
struct MeanRows : Carved<MeanRows, ResidualRun<ckdist_mean_rows_step>> {
  // Buffers of one thread: the sums and a row, each (hidden,).
  struct Room {
    double* sum;
    float* row;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const int64_t n = r.value(step.y).width;
    return {c.array<double>(n), c.floats(n)};
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
    const auto [sum, place] = buffers();
    const Residual rows = residual(place);
    std::fill_n(sum, width(), 0.0);
    for (int64_t row = first; row < last; row++) {
      const float* const s = normed(r, step, rows.read(row, r.token_row(step.step, row)), width(), place);
      for (int64_t i = 0; i < width(); i++) sum[i] += double(s[i]);
    }
    const FloatRows out = r.floats(step.out);
    for (int64_t row = first; row < last; row++)
      for (int64_t i = 0; i < width(); i++) out.row(row)[i] = float(sum[i] / double(last - first));
  }
};

const RegisteredKind<SumRows> kSumRows(ckdist_step_sum_rows);
const RegisteredKind<CopyColumns> kCopyColumns(ckdist_step_copy_columns);
const RegisteredKind<GatherRows> kGatherRows(ckdist_step_gather_rows);
const RegisteredKind<OutputRows> kOutputRows(ckdist_step_output_rows);
const RegisteredKind<MeanRows> kMeanRows(ckdist_step_mean_rows);

}  // namespace
}  // namespace ckdist
