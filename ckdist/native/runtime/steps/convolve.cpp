// Causal depthwise convolutions over packed sequences, and their gradients. The gradients of weights are summed in
// chunks of tokens, which are added in order.
#include "runtime/training.h"

namespace ckdist {
namespace {

constexpr int64_t kConvolveTokens = Training::kSumRows;  // tokens of an item
constexpr int kMostTaps = 16;

// The taps of each channel side by side, (channels, taps) -> (taps, channels); backwards: the last tap first.
void transpose_taps(const float* weight, int64_t channels, int taps, bool backwards, float* out) {
  for (int64_t c = 0; c < channels; ++c)
    for (int i = 0; i < taps; ++i) out[(backwards ? taps - 1 - i : i) * channels + c] = weight[c * taps + i];
}

// Rows of x from the token `first - taps + 1` on, as floats, (taps - 1 + kConvolveTokens, channels).
template <class Run>
void read_before(const Run& run, int64_t first, int64_t end, float* rows) {
  const int64_t n = run.r.width(run.step.x), before = run.step.taps - 1;
  for (int64_t t = std::max<int64_t>(first - before, 0); t < end; ++t) {
    run.r.copy(run.step.x, t, 0, n, rows + (t - first + before) * n);
  }
}

// The rows that the result of a token reads, the oldest first. `zeros` stands for those before its sequence.
template <class Run>
void rows_of(const Run& run, int64_t t, int64_t first, const float* rows, const float* zeros, const float** found) {
  const int64_t n = run.r.width(run.step.x), position = run.r.batch.positions[t];
  for (int i = 0; i < run.step.taps; ++i) {
    const int64_t back = run.step.taps - 1 - i;
    found[i] = back > position ? zeros : rows + (t - first + run.step.taps - 1 - back) * n;
  }
}

struct Convolve : Carved<Convolve, TrainingRun<ckdist_convolve_step>> {
  struct Room {
    float *taps, *rows, *zeros, *out;
  };
  static Room room(Carver& c, const Training& r, const Fields& step) {
    const int64_t n = r.width(step.x);
    return {c.floats(step.taps * n), c.floats((step.taps - 1 + kConvolveTokens) * n), c.floats(n), c.floats(n)};
  }

  void run() {
    const Room own = buffers();
    const int64_t n = r.width(step.x);
    transpose_taps(r.parameter(step.weight), n, step.taps, false, own.taps);
    std::fill_n(own.zeros, n, 0.f);
    const float* const bias = step.bias < 0 ? nullptr : r.parameter(step.bias);
    each_part(r.batch.tokens, kConvolveTokens, [&](int64_t first, int64_t end) {
      read_before(*this, first, end, own.rows);
      for (int64_t t = first; t < end; ++t) {
        const float* rows[kMostTaps];
        rows_of(*this, t, first, own.rows, own.zeros, rows);
        float* const out = r.write(step.out, t, own.out);
        r.kernels.delta_rule.short_conv(rows, own.taps, n, step.taps, bias, step.activates, n, out);
        r.written(step.out, t, out);
      }
    });
  }
};

struct ConvolveGrad : Carved<ConvolveGrad, TrainingRun<ckdist_convolve_grad_step>> {
  struct Room {
    float *taps, *backwards, *rows, *zeros;
    float* sums;  // gradients of the results before SiLU, (kConvolveTokens + taps - 1, channels)
    float *dx, *dy;
  };
  static Room room(Carver& c, const Training& r, const Fields& step) {
    const int64_t n = r.width(step.x), rows = step.taps - 1 + kConvolveTokens;
    return {c.floats(step.taps * n),
            c.floats(step.taps * n),
            c.floats((rows + step.taps - 1) * n),
            c.floats(n),
            c.floats(rows * n),
            c.floats(n),
            c.floats(n)};
  }
  // Partial gradients of the chunks, (chunks, taps + 1, channels): the last row is that of the bias.
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return parts_of(r.program.max_tokens, kConvolveTokens) * (step.taps + 1) * r.width(step.x) * 4;
  }
  float* partial(int64_t chunk) const {
    return reinterpret_cast<float*>(r.workspace()) + chunk * (step.taps + 1) * r.width(step.x);
  }

  const Room own = buffers();
  const int64_t n = r.width(step.x);

  void run() {
    transpose_taps(r.parameter(step.weight), n, step.taps, false, own.taps);
    transpose_taps(r.parameter(step.weight), n, step.taps, true, own.backwards);
    std::fill_n(own.zeros, n, 0.f);
    each_part(r.batch.tokens, kConvolveTokens, [&](int64_t first, int64_t end) { run_chunk(first, end); });
    if (step.weight_gradient < 0 && step.bias_gradient < 0) return;
    each_part(n, Training::kColumns, [&](int64_t begin, int64_t end) { add_partials(begin, end); });
  }

  void run_chunk(int64_t first, int64_t end) {
    // Results up to taps - 1 tokens later read the chunk's inputs, too.
    const int64_t last = std::min(end + step.taps - 1, r.batch.tokens);
    const float* const bias = step.bias < 0 ? nullptr : r.parameter(step.bias);
    read_before(*this, first, last, own.rows);
    float* const sums = partial(first / kConvolveTokens);
    std::fill_n(sums, (step.taps + 1) * n, 0.f);
    for (int64_t t = first; t < last; ++t) {
      const float* rows[kMostTaps];
      rows_of(*this, t, first, own.rows, own.zeros, rows);
      float* const ds = own.sums + (t - first) * n;
      const float* const dy = r.read(step.dy, t, own.dy);
      if (step.activates) {
        r.kernels.delta_rule.short_conv(rows, own.taps, n, step.taps, bias, false, n, own.dx);
        r.kernels.state_gradient.silu(own.dx, dy, n, ds);
      } else {
        std::copy_n(dy, n, ds);
      }
      if (t >= end) continue;
      for (int i = 0; i < step.taps; ++i)
        if (rows[i] != own.zeros) r.kernels.state_gradient.add_products(ds, rows[i], n, sums + i * n);
      r.kernels.elementwise.add(ds, n, sums + step.taps * n);
    }
    for (int64_t t = first; t < end; ++t) {
      const float* later[kMostTaps];
      for (int i = 0; i < step.taps; ++i)  // of the same sequence
        later[i] = t + i < last && r.batch.positions[t + i] == r.batch.positions[t] + i ? own.sums + (t + i - first) * n
                                                                                        : own.zeros;
      float* const dx = r.write(step.dx, t, own.dx);
      r.kernels.delta_rule.short_conv(later, own.backwards, n, step.taps, nullptr, false, n, dx);
      r.written(step.dx, t, dx);
    }
  }

  // Adds the partial gradients of channels [begin, end).
  void add_partials(int64_t begin, int64_t end) const {
    const int64_t count = end - begin;
    for (int64_t chunk = 1; chunk < parts_of(r.batch.tokens, kConvolveTokens); ++chunk)
      for (int i = 0; i <= step.taps; ++i)
        r.kernels.elementwise.add(partial(chunk) + i * n + begin, count, partial(0) + i * n + begin);
    if (step.bias_gradient >= 0)
      r.kernels.elementwise.add(partial(0) + step.taps * n + begin, count, r.gradient(step.bias_gradient) + begin);
    if (step.weight_gradient < 0) return;
    float* const gradient = r.gradient(step.weight_gradient);
    for (int64_t c = begin; c < end; ++c)
      for (int i = 0; i < step.taps; ++i) gradient[c * step.taps + i] += partial(0)[i * n + c];
  }
};

const RegisteredKind<Convolve> kConvolve(ckdist_step_convolve);
const RegisteredKind<ConvolveGrad> kConvolveGrad(ckdist_step_convolve_grad);

}  // namespace
}  // namespace ckdist
