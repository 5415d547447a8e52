// Gradients that are sums over tokens (of norms, biases and embeddings), and sums over ranks. Each chunk of tokens is
// summed separately, and chunks are added in order, so the bits do not depend on threads.
#include "runtime/training.h"

namespace ckdist {
namespace {

int64_t chunks(int64_t tokens) { return parts_of(tokens, Training::kSumRows); }

// Base of steps that sum to vectors. The workspace holds partial sums of the chunks, (chunks, n).
template <class Fields>
struct VectorGradient : TrainingRun<Fields> {
  float* partial() const { return reinterpret_cast<float*>(this->r.workspace()); }

  // Runs body(first token, end, chunk's sums) for every chunk. Adds the chunks' sums to the gradient in order.
  template <class Body>
  void sum_chunks(int64_t n, int32_t gradient, Body&& body) {
    Training& r = this->r;
    this->each_part(r.batch.tokens, Training::kSumRows, [&](int64_t first, int64_t end) {
      float* const sums = gradient < 0 ? nullptr : partial() + first / Training::kSumRows * n;
      if (sums) std::fill_n(sums, n, 0.f);
      body(first, end, sums);
    });
    if (gradient < 0) return;
    this->each_part(n, Training::kColumns, [&](int64_t at, int64_t end) {
      for (int64_t chunk = 1; chunk < chunks(r.batch.tokens); ++chunk)
        r.kernels.elementwise.add(partial() + chunk * n + at, end - at, partial() + at);
      r.kernels.elementwise.add(partial() + at, end - at, r.gradient(gradient) + at);
    });
  }
};

struct RmsNormGrad : VectorGradient<ckdist_rms_norm_grad_step> {
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return chunks(r.program.max_tokens) * step.size * step.groups * 4;
  }

  void run() {
    const int64_t row = r.width(step.x), weights = step.size * step.groups;
    sum_chunks(weights, step.weight_grad, [&](int64_t first, int64_t end, float* dw) {
      for (int64_t t = first; t < end; ++t) {
        const float* const x = r.read(step.x, t, row_buffer(0));
        const float* const dy = r.read(step.dy, t, row_buffer(1));
        float* const dx = r.write(step.dx, t, row_buffer(2));
        for (int64_t at = 0; at < step.normed; at += step.size)
          r.kernels.gradient.rms_norm(x + at, dy + at, r.parameter(step.weight) + at % weights, step.eps, step.size,
                                      dx + at, dw ? dw + at % weights : nullptr);
        std::copy(dy + step.normed, dy + row, dx + step.normed);
        if (step.residual >= 0) r.kernels.elementwise.add(r.read(step.residual, t, row_buffer(3)), row, dx);
        r.written(step.dx, t, dx);
      }
    });
  }
};

struct BiasGrad : VectorGradient<ckdist_bias_grad_step> {
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    int64_t bytes = 0;
    for (int m = 0; m < step.count; ++m)
      bytes = std::max(bytes, chunks(r.program.max_tokens) * r.width(step.gradients[m].dy) * 4);
    return bytes;
  }

  void run() {
    for (int m = 0; m < step.count; ++m) {
      const ckdist_gradient& of = step.gradients[m];
      sum_chunks(r.width(of.dy), of.gradient, [&](int64_t first, int64_t end, float* sums) {
        for (int64_t t = first; t < end; ++t)
          r.kernels.elementwise.add(r.read(of.dy, t, row_buffer(0)), r.width(of.dy), sums);
      });
    }
  }
};

// An item is a few columns of all tokens, in order. So only one thread writes the columns of a row.
struct EmbedGrad : TrainingRun<ckdist_embed_grad_step> {
  void run() {
    const int64_t n = r.width(step.dy), rows = r.shape(step.gradient).rows;
    float* const table = r.gradient(step.gradient);
    each_part(n, Training::kColumns, [&](int64_t at, int64_t end) {
      for (int64_t t = 0; t < r.batch.tokens; ++t) {
        const int64_t row = r.batch.token_ids[t] - step.first_row;
        if (row >= 0 && row < rows)
          r.kernels.elementwise.add(r.floats(step.dy, t) + at, end - at, table + row * n + at);
      }
    });
  }
};

// Starts a sum over ranks. Its inputs were complete at the last barrier, and no later step writes them.
struct ReduceGradients : TrainingRun<ckdist_reduce_gradients_step> {
  void run() {
    if (thread == 0) r.begin_reduce(step);
  }
};

struct PlaceParameters : TrainingRun<ckdist_place_parameters_step> {
  void run() {
    r.meet(thread, index, true, [&](Idle) { r.place_parameters(step); });
  }
};

// Sums whole rows with their padding, whose values are not used.
struct AllReduce : TrainingRun<ckdist_all_reduce_step> {
  void run() {
    const int64_t floats = r.batch.tokens * r.value(step.x).stride / 4;
    r.meet(thread, index, true, [&](Idle) { r.sum_over_tensor(r.floats(step.x, 0), floats); });
  }
};

const RegisteredKind<AllReduce> kAllReduce(ckdist_step_all_reduce);
const RegisteredKind<RmsNormGrad> kRmsNormGrad(ckdist_step_rms_norm_grad);
const RegisteredKind<BiasGrad> kBiasGrad(ckdist_step_bias_grad);
const RegisteredKind<EmbedGrad> kEmbedGrad(ckdist_step_embed_grad);
const RegisteredKind<ReduceGradients> kReduceGradients(ckdist_step_reduce_gradients);
const RegisteredKind<PlaceParameters> kPlaceParameters(ckdist_step_place_parameters);

}  // namespace
}  // namespace ckdist
