// Chooses the next token from a row of logits, and log-probabilities. One thread; knows nothing of sequences.
//
// Order: logit_bias, penalties -> temperature -> top_k -> top_p -> min_p -> draw. Bias and penalties come first, as in llama-server
// and vLLM; temperature before the cuts, as in vLLM and Hugging Face, so that top_p and min_p measure the distribution that
// is drawn from. (llama-server's default chain cuts first and applies the temperature last.)
//
// Every cut keeps a prefix of one order: larger logit first, among equals the lower token. So a cut is found by selection, never
// by sorting the vocabulary. The draw then walks the kept tokens by ascending token, so that noise in the last bits of the
// logits moves its boundaries by as little.
#pragma once
#include <cstdint>
#include <vector>

#include "core/export.h"

#include "api/sampler.h"
#include "kernels/kernels.h"

namespace ckdist {

// Uniform in (0, 1), from (seed, position) alone: two rounds of the finaliser of SplitMix64 (Steele, Lea & Flood 2014).
double uniform_draw(uint64_t seed, int64_t position);

class Sampler {
 public:
  Sampler(const Kernels& kernels, int64_t vocab);

  // Each throws Error, naming `row`, where a logit is NaN or infinite or a parameter is out of its range.
  int32_t greedy(const float* logits, int32_t row);
  void sample(const float* logits, int32_t row, const ckdist_sampling& sampling, ckdist_sampled_token& out);
  void logprobs(const float* logits, int32_t row, int32_t target, int32_t top, ckdist_sampled_token& out);

 private:
  struct Candidate {
    float logit;
    int32_t token;
    float term;  // exp((logit - largest logit) / temperature)
  };
  static bool before(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  }

  void check(const ckdist_sampling& sampling, int32_t row) const;
  void check_tokens(const int32_t* tokens, int64_t count, const char* what, int32_t row) const;
  void scan(const float* logits, int32_t row);
  float largest() const;
  int32_t best(const float* logits) const;
  void gather(const float* logits, float threshold);
  float threshold_for(int64_t count);
  float threshold_of_mass(const float* logits, float low, float high, double target) const;
  void keep_top(const float* logits, int64_t count);
  void keep_until(const Candidate& last);
  double weigh(float shift, float scale);
  bool keep_mass(double target);
  const float* modify(const float* logits, const ckdist_sampling& sampling, int32_t row);
  int32_t draw(const float* logits, const ckdist_sampling& sampling);
  int32_t draw_from_all(const float* logits, float shift, float scale, double uniform);
  void fill_top(const float* logits, double log_normaliser, int32_t top, ckdist_sampled_token& out);
  double log_normaliser(const float* logits) const;

  const Kernels& kernels_;
  const int64_t vocab_;
  std::vector<float> maxima_;           // of the row last scanned, as ElementwiseKernel::maxima leaves them
  std::vector<float> selected_maxima_;
  std::vector<float> modified_;         // (vocab,)
  std::vector<float> terms_;            // (vocab,)
  std::vector<float> logits_of_candidates_;
  std::vector<float> terms_of_candidates_;
  std::vector<uint32_t> seen_;          // (vocab,): count in the output, and kInPrompt
  std::vector<int32_t> touched_;        // tokens whose entry in seen_ is not 0
  std::vector<Candidate> candidates_;   // by ascending token
  std::vector<Candidate> selection_;
};

}  // namespace ckdist
