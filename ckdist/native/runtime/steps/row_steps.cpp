// Training steps whose rows are independent of each other.
#include "runtime/scalars.h"
#include "runtime/training.h"

namespace ckdist {
namespace {

struct Lookup : TokenRun<Lookup, ckdist_lookup_step> {
  // out = the table's row of a token's id: in place or unpacked; zeros if another rank has the row.
  void token(int64_t t) {
    const int64_t n = r.width(step.out);
    float* const out = r.write(step.out, t, row_buffer(3));
    const int64_t id = r.batch.token_ids[t] - step.first_row;
    if (id < 0 || id >= r.shape(step.table).rows) {
      std::fill_n(out, n, 0.f);
    } else if (const float* const row = r.parameter_rows(step.table, id, 1, out); row != out) {
      std::copy_n(row, n, out);
    }
    r.written(step.out, t, out);
  }
};

struct Convert : TokenRun<Convert, ckdist_convert_step> {
  void token(int64_t t) {
    const int64_t copied = std::min(r.width(step.x), r.width(step.out)), zeros = r.width(step.out) - copied;
    r.store(step.out, t, 0, r.read(step.x, t, row_buffer(0)), copied);
    if (zeros) std::fill_n(row_buffer(1), zeros, 0.f), r.store(step.out, t, copied, row_buffer(1), zeros);
  }
};

struct Scale : TokenRun<Scale, ckdist_scale_step> {
  void token(int64_t t) {
    r.kernels.row.scale(r.row(step.x, t), step.factor, r.width(step.out), r.row(step.out, t));
    r.pad(step.out, t);
  }
};

struct ScaleQueries : TokenRun<ScaleQueries, ckdist_scale_queries_step> {
  void token(int64_t t) {
    const float factor = query_factor(step.query_beta, step.query_context, r.batch.positions[t] + step.query_from_one);
    r.kernels.row.scale(r.row(step.x, t), factor, r.width(step.out), r.row(step.out, t));
    r.pad(step.out, t);
  }
};

struct Add : TokenRun<Add, ckdist_add_step> {
  void token(int64_t t) {
    float* const out = r.write(step.out, t, row_buffer(3));
    const float* const y = r.read(step.y, t, row_buffer(1));
    r.kernels.elementwise.sum_parts(r.read(step.x, t, row_buffer(0)), &y, 1, r.width(step.out), out);
    r.written(step.out, t, out);
  }
};

struct RmsNorm : TokenRun<RmsNorm, ckdist_rms_norm_step> {
  void token(int64_t t) {
    float* const out = r.write(step.out, t, row_buffer(3));
    const float* const x = r.read(step.x, t, row_buffer(0));
    for (int64_t at = 0; at < step.normed; at += step.size)
      r.kernels.elementwise.rms_norm(x + at, r.parameter(step.weight) + at % (step.size * step.groups), step.eps,
                                     step.size, out + at);
    std::copy(x + step.normed, x + r.width(step.out), out + step.normed);
    r.written(step.out, t, out);
  }
};

struct Rotate : TokenRun<Rotate, ckdist_rope_step> {
  void token(int64_t t) {
    const ckdist_rope& rope = r.program.ropes[step.table];
    const int64_t at = r.batch.positions[t] * (rope.dims / 2);
    const Rope angles{rope.cos + at, rope.sin + at, rope.dims, rope.interleaved != 0};
    const Row x = r.row(step.x, t), out = r.row(step.out, t);
    if (step.first == 0) r.kernels.row.rope(x, angles, step.back, step.width, r.width(step.out), out);
    else
      for (int64_t head = 0; head < r.width(step.out); head += step.width) rotate_end(x, angles, head, out);
    r.pad(step.out, t);
  }

  // Rotates the end of the head that begins at element `head`. Copies its first step.first elements.
  void rotate_end(Row x, const Rope& angles, int64_t head, Row out) const {
    const int64_t n = step.width - step.first, end = head + step.first;
    const auto part = [](Row row, int64_t at) { return Row{row.at + at * (row.narrow ? 2 : 4), row.narrow}; };
    r.kernels.row.scale(part(x, head), 1.f, step.first, part(out, head));
    r.kernels.row.rope(part(x, end), angles, step.back, n, n, part(out, end));
  }
};

// The gates of a token: its row, or the gate of each head for all elements of the head, in `room`.
template <class Run>
Row gates_of(const Run& run, int64_t t, int64_t n, float* room) {
  const int64_t heads = run.r.width(run.step.gate);
  if (heads == n) return run.r.row(run.step.gate, t);
  const float* const gates = run.r.read(run.step.gate, t, run.row_buffer(0));
  for (int64_t h = 0; h < heads; h++) std::fill_n(room + h * (n / heads), n / heads, gates[h]);
  return float_row(room);
}

struct Gated : TokenRun<Gated, ckdist_gated_step> {
  void token(int64_t t) {
    const int64_t n = r.width(step.out);
    const Row gate = gates_of(*this, t, n, row_buffer(1));
    r.kernels.row.gated(GateFunction(step.function), gate, r.row(step.up, t), n, r.row(step.out, t));
    r.pad(step.out, t);
  }
};

struct GatedGrad : TokenRun<GatedGrad, ckdist_gated_grad_step> {
  void token(int64_t t) {
    const int64_t n = r.width(step.d_up), heads = r.width(step.d_gate);
    float* const of_elements = row_buffer(2);
    const Row gate = gates_of(*this, t, n, row_buffer(1)), up = r.row(step.up, t), dy = r.row(step.dy, t);
    const Row d_gate = heads == n ? r.row(step.d_gate, t) : float_row(of_elements);
    r.kernels.row.gated_grad(GateFunction(step.function), gate, up, dy, n, d_gate, r.row(step.d_up, t));
    if (heads < n) {
      for (int64_t h = 0; h < heads; h++)
        of_elements[h] = std::accumulate(of_elements + h * (n / heads), of_elements + (h + 1) * (n / heads), 0.f);
      r.store(step.d_gate, t, 0, of_elements, heads);
    }
    r.pad(step.d_gate, t), r.pad(step.d_up, t);
  }
};

const RegisteredKind<Lookup> kLookup(ckdist_step_lookup);
const RegisteredKind<Convert> kConvert(ckdist_step_convert);
const RegisteredKind<Scale> kScale(ckdist_step_scale);
const RegisteredKind<ScaleQueries> kScaleQueries(ckdist_step_scale_queries);
const RegisteredKind<Add> kAdd(ckdist_step_add);
const RegisteredKind<RmsNorm> kRmsNorm(ckdist_step_rms_norm);
const RegisteredKind<Rotate> kRotate(ckdist_step_rope);
const RegisteredKind<Gated> kGated(ckdist_step_gated);
const RegisteredKind<GatedGrad> kGatedGrad(ckdist_step_gated_grad);

}  // namespace
}  // namespace ckdist
