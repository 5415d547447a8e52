#include <algorithm>

#include "core/error.h"
#include "runtime/sampler.h"

using ckdist::guard;
using ckdist::Sampler;

struct ckdist_sampler {
  Sampler sampler;
};

extern "C" {

struct ckdist_dry_breakers* ckdist_dry_breakers_open(const uint8_t* pieces, const int64_t* piece_begins, int64_t tokens,
                                                     const uint8_t* breakers, const int64_t* breaker_begins,
                                                     int32_t count, const int32_t* tails, const int64_t* tail_begins) {
  ckdist_dry_breakers* opened = nullptr;
  guard([&] {
    opened = new ckdist_dry_breakers(pieces, piece_begins, tokens, breakers, breaker_begins, count, tails, tail_begins);
  });
  return opened;
}

void ckdist_dry_breakers_close(struct ckdist_dry_breakers* breakers) { delete breakers; }

int64_t ckdist_dry_breakers_list(const struct ckdist_dry_breakers* breakers, int32_t* heads, int32_t* lengths,
                                 int64_t capacity) {
  const auto& entries = breakers->entries();
  const int64_t count = static_cast<int64_t>(entries.size());
  for (int64_t i = 0; i < std::min(count, capacity); ++i) {
    heads[i] = entries[i].head;
    lengths[i] = static_cast<int32_t>(breakers->tail_length(entries[i]));
  }
  return count;
}

struct ckdist_sampler* ckdist_sampler_open(int64_t vocab) {
  ckdist_sampler* opened = nullptr;
  guard([&] { opened = new ckdist_sampler{Sampler(ckdist::kernels(), vocab)}; });
  return opened;
}

void ckdist_sampler_close(struct ckdist_sampler* sampler) { delete sampler; }

int32_t ckdist_sample(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                      const struct ckdist_sampling* sampling, struct ckdist_sampled_token* out) {
  return guard([&] {
    for (int32_t row = 0; row < rows; ++row)
      sampler->sampler.sample(logits + row * row_stride, row, sampling[row], out[row]);
  });
}

int32_t ckdist_sample_greedy(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                             int32_t* tokens) {
  return guard([&] {
    for (int32_t row = 0; row < rows; ++row) tokens[row] = sampler->sampler.greedy(logits + row * row_stride, row);
  });
}

int32_t ckdist_logprobs(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                        const int32_t* targets, int32_t top, struct ckdist_sampled_token* out) {
  return guard([&] {
    for (int32_t row = 0; row < rows; ++row)
      sampler->sampler.logprobs(logits + row * row_stride, row, targets[row], top, out[row]);
  });
}

}  // extern "C"
