#include "runtime/sampler.h"

#include "core/error.h"

using ckdist::Sampler;
using ckdist::guard;

struct ckdist_sampler {
  Sampler sampler;
};

extern "C" {

struct ckdist_sampler* ckdist_sampler_open(int64_t vocab) {
  ckdist_sampler* opened = nullptr;
  guard([&] { opened = new ckdist_sampler{Sampler(ckdist::kernels(), vocab)}; });
  return opened;
}

void ckdist_sampler_close(struct ckdist_sampler* sampler) { delete sampler; }

int32_t ckdist_sample(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                      const struct ckdist_sampling* sampling, struct ckdist_sampled_token* out) {
  return guard([&] {
    for (int32_t row = 0; row < rows; ++row) sampler->sampler.sample(logits + row * row_stride, row, sampling[row], out[row]);
  });
}

int32_t ckdist_sample_greedy(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows, int32_t* tokens) {
  return guard([&] {
    for (int32_t row = 0; row < rows; ++row) tokens[row] = sampler->sampler.greedy(logits + row * row_stride, row);
  });
}

int32_t ckdist_logprobs(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows, const int32_t* targets,
                        int32_t top, struct ckdist_sampled_token* out) {
  return guard([&] {
    for (int32_t row = 0; row < rows; ++row)
      sampler->sampler.logprobs(logits + row * row_stride, row, targets[row], top, out[row]);
  });
}

}  // extern "C"
