#pragma once
#include "api/export.h"
#include "api/pool_api.h"

/* How one row's token is chosen. The order is in runtime/sampler.h. */
struct ckdist_sampling {
  float temperature;        /* below 1e-5: greedy; the lowest index wins ties */
  int32_t top_k;            /* 0 or less: off */
  float top_p;              /* 1: off */
  float min_p;              /* 0: off */
  float repetition_penalty; /* 1: off */
  float presence_penalty;
  float frequency_penalty;
  int32_t top_logprobs; /* -1: no log-probabilities; 0: of the chosen token; n: and of the n most likely (at most 20) */
  uint64_t seed;
  int64_t position;             /* the draw depends only on (seed, position) */
  const int32_t* prompt_tokens; /* used only for penalties */
  int64_t prompt_count;
  const int32_t* output_tokens;
  int64_t output_count;
  const int32_t* bias_tokens;
  const float* bias_values;
  int64_t bias_count;
  /* For each of the following fields, zero means off. */
  int64_t penalty_window; /* last tokens that penalties count; 0: all for repetition, the output for the others */
  float dry_multiplier;
  float dry_base;
  int32_t dry_allowed_length;
  int32_t dry_window;                             /* number of last tokens that are searched; -1: all */
  const struct ckdist_dry_breakers* dry_breakers; /* null: none */
  const int32_t* banned_tokens;                   /* never sampled */
  int64_t banned_count;
  const int32_t* steps; /* of enum ckdist_sampling_step */
  int32_t step_count;   /* 0: penalties, DRY, temperature, top_k, top_p, min_p */
  int32_t min_keep;     /* minimum tokens that each filter keeps. This and all fields below need `steps` */
  float typical_p;
  float top_n_sigma;
  float xtc_probability;
  float xtc_threshold;
  float dynatemp_range;
  float dynatemp_exponent;
  int32_t mirostat;   /* 0, 1 or 2. It runs after the last step and chooses the token */
  float mirostat_tau; /* target surprise in bits */
  float mirostat_eta; /* learning rate */
  float mirostat_mu;  /* the sequence's state: initially 2 tau, then the result of the token before */
  /* Bit t % 32 of word t / 32: token t is allowed. Tokens beyond the words are not. Null: all tokens are allowed. */
  const uint32_t* allowed;
  int64_t allowed_words;
};

enum ckdist_sampling_step {
  CKDIST_STEP_PENALTIES,
  CKDIST_STEP_DRY,
  CKDIST_STEP_TEMPERATURE,
  CKDIST_STEP_TOP_N_SIGMA,
  CKDIST_STEP_TOP_K,
  CKDIST_STEP_TYPICAL_P,
  CKDIST_STEP_TOP_P,
  CKDIST_STEP_MIN_P,
  CKDIST_STEP_XTC
};

/* Log-probabilities are of the original logits, before any penalty, bias or temperature. */
struct ckdist_sampled_token {
  int32_t token;
  float logprob;     /* NaN if not requested */
  float mirostat_mu; /* after this token */
  int32_t top_count;
  int32_t top_tokens[20]; /* most likely first */
  float top_logprobs[20];
};

/* Tokens that contain or begin a breaker: a string that repetitions do not cross. Returns null on failure.
   pieces: the bytes of all tokens; token i is [piece_begins[i], piece_begins[i + 1]).
   breakers: at most 64, in the same form.
   tails: the tokens of every proper suffix of every breaker, in the order of breakers, the longest suffix first. A
   suffix whose first token is -1 has no tokens and matches nothing. */
struct ckdist_dry_breakers;
CKDIST_EXPORT struct ckdist_dry_breakers* ckdist_dry_breakers_open(const uint8_t* pieces, const int64_t* piece_begins,
                                                                   int64_t tokens, const uint8_t* breakers,
                                                                   const int64_t* breaker_begins, int32_t count,
                                                                   const int32_t* tails, const int64_t* tail_begins);
CKDIST_EXPORT void ckdist_dry_breakers_close(struct ckdist_dry_breakers* breakers);
/* Lists the tokens that begin a breaker, each with a tail of it, ascending by token. Writes at most `capacity` heads
   and lengths of tails, and returns the total number. */
CKDIST_EXPORT int64_t ckdist_dry_breakers_list(const struct ckdist_dry_breakers* breakers, int32_t* heads,
                                               int32_t* lengths, int64_t capacity);

/* Scratch memory for one vocabulary, for one thread at a time. `pool`: threads that divide many rows, or null. They may
   end before the sampler does. No job of theirs may run during a call. Returns null on failure. */
struct ckdist_sampler;
CKDIST_EXPORT struct ckdist_sampler* ckdist_sampler_open(int64_t vocab, const struct ckdist_pool* pool);
CKDIST_EXPORT void ckdist_sampler_close(struct ckdist_sampler* sampler);

/* logits: (rows, vocab), row_stride floats apart. NaN or infinity is an error that names the row. */
CKDIST_EXPORT int32_t ckdist_sample(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride,
                                    int32_t rows, const struct ckdist_sampling* sampling,
                                    struct ckdist_sampled_token* out);
CKDIST_EXPORT int32_t ckdist_sample_greedy(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride,
                                           int32_t rows, int32_t* tokens);
/* The log-probabilities of one given token per row and of the `top` most likely tokens. */
CKDIST_EXPORT int32_t ckdist_logprobs(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride,
                                      int32_t rows, const int32_t* targets, int32_t top,
                                      struct ckdist_sampled_token* out);
