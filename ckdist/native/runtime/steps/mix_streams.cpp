// Hyper-connections: several streams of hidden states, which each part of a layer reads as one and writes to all.
//
// A thread computes chunks of columns. The sums over a row are added in the order of the chunks, so the bits do not
// depend on the threads.
#include "runtime/scalars.h"
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

constexpr int kMostMixed = 8;
constexpr int64_t kMixColumns = 256;  // columns of each stream

struct MixStreams : InferenceRun<ckdist_mix_streams_step> {
  static int64_t thread_bytes(const Inference&, const Fields&) { return kMixColumns * int64_t{sizeof(float)}; }
  static int64_t workspace_bytes(const Inference& r, const Fields& step) {
    return r.program.max_tokens * chunks_of(r, step) * parts(step) * int64_t{sizeof(float)};
  }
  static int64_t chunks_of(const Inference& r, const Fields& step) {
    return (r.value(step.y).width + kMixColumns - 1) / kMixColumns;
  }
  static int weights(const Fields& step) {
    return step.streams * (step.coefs < 0 ? 1 : step.apart ? 2 : step.streams + 2);
  }
  static int parts(const Fields& step) { return weights(step) + 1; }  // the last one is the sum of squares

  int64_t width() const { return r.value(step.y).width; }
  float* row(int32_t value, int64_t t) const { return r.floats(value).row(t); }
  Range columns(int64_t chunk) const { return {chunk * kMixColumns, std::min((chunk + 1) * kMixColumns, width())}; }

  void run() {
    const int64_t tokens = r.local_tokens, chunks = chunks_of(r, step), items = tokens * chunks;
    // A thread keeps the columns of `fn` in its cache from token to token.
    each_own_item(items, [&](int64_t i) { add(i % tokens, i / tokens); });
    r.meet(thread, index);
    float c[kMostMixed * (kMostMixed + 2)];
    int64_t last = -1;
    each_own_item(items, [&](int64_t i) {
      const int64_t t = i / chunks, chunk = i % chunks;
      if (t != last) coefficients(t, c);
      last = t;
      if (chunk == 0 && step.coefs >= 0) std::copy(c + step.streams, c + weights(step), row(step.coefs, t));
      collapse(t, columns(chunk), c);
    });
    r.finish(thread, index, step.out, r.local_tokens);
  }

  // Makes a chunk of the streams, and its parts of the sums.
  void add(int64_t t, int64_t chunk) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const Range at = columns(chunk);
    const int64_t n = at.end - at.begin, count = step.streams;
    const float* const y = Residual{r, thread, buffer(), step.y}.summed(t, t, at);
    const float* const post = step.x < 0 ? nullptr : row(step.old_coefs, t);
    float* const sums = reinterpret_cast<float*>(r.workspace()) + (t * chunks_of(r, step) + chunk) * parts(step);
    std::fill(sums, sums + parts(step), 0.f);
    for (int64_t i = 0; i < count; i++) {
      float* const out = row(step.sum, t) + i * width() + at.begin;
      scaled(y, post ? post[i] : 1.f, n, out);
      if (post && step.apart) k.add_scaled(row(step.x, t) + i * width() + at.begin, 1.f, n, out);
      for (int64_t j = 0; post && !step.apart && j < count; j++)
        k.add_scaled(row(step.x, t) + j * width() + at.begin, post[count + j * count + i], n, out);
      sums[parts(step) - 1] += k.sum_squares(out, n);
      const float* fn = step.fn < 0 ? nullptr : r.vector(step.fn) + i * width() + at.begin;
      for (int w = 0; step.fn >= 0 && w < weights(step); w++, fn += count * width())
        sums[w] += r.kernels.row.dot(float_row(fn), float_row(out), n);
    }
  }

  // (pre, post, comb) of a token.
  void coefficients(int64_t t, float* c) const {
    const int64_t chunks = chunks_of(r, step);
    const int count = step.streams, all = weights(step);
    if (step.fn < 0) return void(std::fill(c, c + count, 1.f / float(count)));
    const float* sums = reinterpret_cast<const float*>(r.workspace()) + t * chunks * parts(step);
    float squares = 0.f;
    std::fill(c, c + all, 0.f);
    for (int64_t chunk = 0; chunk < chunks; chunk++, sums += parts(step)) {
      for (int w = 0; w < all; w++) c[w] += sums[w];
      squares += sums[all];
    }
    const float inverse = 1.f / std::sqrt(squares / float(count * width()) + step.norm_eps);
    const float *const base = r.vector(step.base), *const scale = r.vector(step.scale);
    for (int w = 0; w < all; w++) c[w] = c[w] * inverse * scale[std::min(w / count, 2)] + base[w];
    for (int w = 0; w < std::min(all, 2 * count); w++) c[w] = sigmoid(c[w]);
    for (int w = 0; w < count; w++) c[w] += step.eps;
    for (int w = count; w < std::min(all, 2 * count); w++) c[w] = c[w] * step.magnitude + (step.apart ? step.eps : 0.f);
    if (all > 2 * count) balance(c + 2 * count);
  }

  // Makes a matrix whose rows and columns have sums near 1. Sinkhorn & Knopp 1967.
  void balance(float* m) const {
    const int n = step.streams;
    for (float* row = m; row < m + n * n; row += n) {
      const float most = *std::max_element(row, row + n);
      float sum = 0.f;
      for (int i = 0; i < n; i++) sum += row[i] = std::exp(row[i] - most);
      for (int i = 0; i < n; i++) row[i] = row[i] / sum + step.eps;
    }
    const auto divide = [&](int from, int stride) {
      float sum = 0.f;
      for (int i = 0; i < n; i++) sum += m[from + i * stride];
      for (int i = 0; i < n; i++) m[from + i * stride] /= sum + step.eps;
    };
    for (int pass = 0; pass < step.iterations; pass++) {
      for (int i = 0; pass > 0 && i < n; i++) divide(i * n, 1);
      for (int i = 0; i < n; i++) divide(i, n);
    }
  }

  void collapse(int64_t t, Range at, const float* pre) const {
    const int64_t n = at.end - at.begin;
    float* const out = row(step.out, t) + at.begin;
    const float* const streams = row(step.sum, t) + at.begin;
    scaled(streams, pre[0], n, out);
    for (int64_t i = 1; i < step.streams; i++) r.kernels.elementwise.add_scaled(streams + i * width(), pre[i], n, out);
  }
};

const RegisteredKind<MixStreams> kMixStreams(ckdist_step_mix_streams);

}  // namespace
}  // namespace ckdist
