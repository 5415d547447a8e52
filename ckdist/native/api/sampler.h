#ifndef CKDIST_API_SAMPLER_H
#define CKDIST_API_SAMPLER_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* How one row's token is chosen; runtime/sampler.h says in which order. */
struct ckdist_sampling {
  float temperature;            /* below 1e-5: greedy, the lowest index wins ties */
  int32_t top_k;                /* 0 or less: off */
  float top_p;                  /* 1: off */
  float min_p;                  /* 0: off */
  float repetition_penalty;     /* 1: off */
  float presence_penalty;
  float frequency_penalty;
  int32_t top_logprobs;         /* -1: no log-probabilities; 0: the chosen token's; n: and the n most likely (at most 20) */
  uint64_t seed;
  int64_t position;             /* the draw depends on (seed, position) alone */
  const int32_t* prompt_tokens; /* read for penalties alone */
  int64_t prompt_count;
  const int32_t* output_tokens;
  int64_t output_count;
  const int32_t* bias_tokens;
  const float* bias_values;
  int64_t bias_count;
};

/* Log-probabilities are of the logits as they came, before any penalty, bias or temperature. */
struct ckdist_sampled_token {
  int32_t token;
  float logprob;                /* NaN where none was asked for */
  int32_t top_count;
  int32_t top_tokens[20];       /* most likely first */
  float top_logprobs[20];
};

/* Holds scratch for one vocabulary; for one thread at a time. Null on failure. */
struct ckdist_sampler;
CKDIST_EXPORT struct ckdist_sampler* ckdist_sampler_open(int64_t vocab);
CKDIST_EXPORT void ckdist_sampler_close(struct ckdist_sampler* sampler);

/* logits: (rows, vocab), row_stride floats apart. A row with a NaN or an infinity is an error that names the row. */
CKDIST_EXPORT int32_t ckdist_sample(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                                    const struct ckdist_sampling* sampling, struct ckdist_sampled_token* out);
CKDIST_EXPORT int32_t ckdist_sample_greedy(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                                           int32_t* tokens);
/* The log-probability of one given token per row, and the `top` most likely. */
CKDIST_EXPORT int32_t ckdist_logprobs(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                                      const int32_t* targets, int32_t top, struct ckdist_sampled_token* out);

#ifdef __cplusplus
} // extern "C"
#endif
#endif
