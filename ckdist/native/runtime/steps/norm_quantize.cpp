// The residual's sum, its norm, and the activations for the products that follow.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct NormQuantize : ResidualRun<ckdist_norm_quantize_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    const int64_t gated = step.gate >= 0 ? Residual::row_bytes(r, step.gate) * step.gate_width : 0;
    return room_bytes(r, step) + std::max(Residual::row_bytes(r, step.y), gated) + (step.gate_width > 1 ? gated : 0);
  }

  // Bytes for a row whose columns are in the order of a matrix.
  static int64_t room_bytes(const Inference& r, const Fields& step) {
    int64_t most = 0;
    for (const ckdist_span& shards : step.activations)
      for (int c = 0; c < shards.count; c++)
        if (const ckdist_value& a = r.value(shards.first + c); a.order) most = std::max(most, a.floats);
    return (most * int64_t{sizeof(float)} + 63) / 64 * 64;
  }

  void run() {
    const int64_t n = r.rows(step.step);
    if (r.replicated(step.step)) {
      // Every thread computes every row itself. One thread also stores the row's residual for later steps.
      if (r.value(step.y).place != ckdist_place_columns) shared = residual(room()).shared(n, step.step, index);
      for (int64_t row = 0; row < n; row++) make_row(row, row % r.active() == thread);
      return;
    }
    each_row(n, [&](int64_t row) { make_row(row, true); });
    if (step.gather) gather();
    else r.meet(thread, index);
  }

  // Gathers the rows of all hosts.
  void gather() const {
    StepTeam team(r, thread, index);
    for (const ckdist_span& shards : step.activations)
      for (int c = 0; c < shards.count; c++) {
        const ckdist_value& a = r.value(shards.first + c);
        r.host_rows->all_gather(team, r.step_activations(shards.first + c), a.stride, index);
      }
    if (!step.gather_sum) return;
    const int64_t row_bytes = r.value(step.sum).width * int64_t{sizeof(float)};
    r.host_rows->all_gather(team, r.step_activations(step.sum), row_bytes, index);
  }

  float* room() const { return reinterpret_cast<float*>(r.memory(thread) + room_bytes(r, step)); }  // of a row

  // A gate for each element of a row of y.
  const float* gate_row(int64_t out_row, int64_t in_row) const {
    const float* const row = r.floats(step.gate).row(r.value(step.gate).selected ? out_row : in_row);
    if (step.gate_width <= 1) return row;
    const int64_t count = r.value(step.gate).width;
    float* const wide = reinterpret_cast<float*>(r.memory(thread) + thread_bytes(r, step) -
                                                 Residual::row_bytes(r, step.gate) * step.gate_width);
    for (int64_t i = 0; i < count; i++) std::fill_n(wide + i * step.gate_width, step.gate_width, row[i]);
    return wide;
  }

  void make_row(int64_t out_row, bool keep) {
    const ckdist_value& y = r.value(step.y);
    const int64_t in_row = r.token_row(step.step, out_row);
    float* const room = this->room();
    const float* const gate = step.gate >= 0 ? gate_row(out_row, in_row) : nullptr;
    if (y.place == ckdist_place_columns) return quantize_columns(y, out_row, in_row, gate, room);
    const ElementwiseKernel& k = r.kernels.elementwise;
    const Residual rows = residual(room);
    const float* s = shared == nullptr ? rows.read(out_row, in_row) : shared + out_row * y.width;
    if (shared != nullptr && step.post_norm >= 0) s = rows.added(s, out_row, in_row, {0, y.width});
    if (gate != nullptr) k.gated(GateFunction(step.gate_function), gate, s, y.width, room), s = room;
    const int64_t place = r.first_row(step.step) + out_row;  // row in `sum` and `normed`
    if (step.sum >= 0 && keep) std::copy_n(s, y.width, r.floats(step.sum).row(place));
    s = normed(r, step, s, y.width, room);
    if (step.normed >= 0 && keep) std::copy_n(s, y.width, r.floats(step.normed).row(place));
    each_shard([&](int, int value, uint8_t* base, const float* part) { quantize(value, part, base, out_row); }, s);
  }

  // Quantizes a row whose columns are in the slots of several ranks. gate: (columns of all ranks,), or null. room:
  // (columns of all ranks,).
  void quantize_columns(const ckdist_value& y, int64_t out_row, int64_t in_row, const float* gate, float* room) {
    each_shard(
        [&](int rank, int value, uint8_t* base, const float* part) {
          const ckdist_value& a = r.value(value);
          const float* s = r.peer_slot(y, rank) + (r.first_token + in_row) * a.floats;
          if (part != nullptr)
            r.kernels.elementwise.gated(GateFunction(step.gate_function), part, s, a.floats, room), s = room;
          quantize(value, s, base, out_row);
          r.count_moved(thread, rank == r.ranks->local_rank ? 0 : a.floats * 4);
        },
        gate);
  }

  // Calls visit(shard, its activations, row 0 of them, the shard's floats in `s`) for every format and shard.
  template <class Visit>
  void each_shard(Visit&& visit, const float* s) {
    for (const ckdist_span& shards : step.activations) {
      const float* part = s;
      for (int c = 0; c < shards.count; c++) {
        visit(c, shards.first + c, r.activations(thread, step.step, shards.first + c), part);
        if (part) part += r.value(shards.first + c).floats;
      }
    }
  }

  void quantize(int value, const float* x, uint8_t* base, int64_t row) const {
    const ckdist_value& a = r.value(value);
    if (a.order) {
      float* const ordered = buffer();
      for (int64_t i = 0; i < a.floats; ++i) ordered[i] = x[a.order[i]];
      x = ordered;
    }
    if (a.width == 0) return;
    const ElementwiseKernel& k = r.kernels.elementwise;
    if (r.in_strips(step.step, value))
      k.prepare_in_strip(x, a.floats, a.lead, a.width, base + ActivationRow::strip_offset(row, 0, a.stride));
    else k.prepare(ActivationFormat(a.format), x, a.floats, a.lead, a.width, base + row * a.stride);
  }

  const float* shared = nullptr;  // rows that all threads have summed together
};

const RegisteredKind<NormQuantize> kNormQuantize(ckdist_step_norm_quantize);

}  // namespace
}  // namespace ckdist
