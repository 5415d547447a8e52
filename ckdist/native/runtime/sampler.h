// Chooses the next token from a row of logits, and computes log-probabilities. One thread at a time uses it; it has no
// state of sequences.
//
// Order: logit_bias, penalties, DRY -> temperature -> top_k -> top_p -> min_p -> draw. Bias and penalties come first,
// as in llama-server and vLLM. Temperature precedes the cuts, as in vLLM and Hugging Face, so that top_p and min_p
// measure the distribution that is sampled. A row with `steps` applies these after logit_bias, in their order, with
// llama.cpp's definitions (sampler_steps.cpp), and then mirostat if it is on.
//
// Cuts keep a prefix of one order: larger logit first; of equal logits, the lower token first. (typical_p keeps a
// prefix of another order, XTC a suffix.) So a cut is found by selection, without sorting the vocabulary. The draw
// visits the kept tokens by ascending token, so that noise in the last bits of the logits moves its boundaries only
// slightly.
//
// A removed token has the lowest finite logit, kRemoved.
#pragma once
#include <algorithm>
#include <limits>

#include "api/sampler_api.h"
#include "kernels/kernels.h"
#include "runtime/dry.h"

namespace ckdist {

// Uniform in (0, 1), a function of (seed, position): two rounds of the finaliser of SplitMix64 (Steele, Lea & Flood
// 2014).
double uniform_draw(uint64_t seed, int64_t position);

class Sampler {
 public:
  Sampler(const Kernels& kernels, int64_t vocab);

  // Each throws Error, naming `row`, if a logit is NaN or infinite or a parameter is out of its range.
  int32_t greedy(const float* logits, int32_t row);
  void sample(const float* logits, int32_t row, const ckdist_sampling& sampling, ckdist_sampled_token& out);
  void logprobs(const float* logits, int32_t row, int32_t target, int32_t top, ckdist_sampled_token& out);

 private:
  static constexpr float kRemoved = -std::numeric_limits<float>::max();
  static constexpr float kGreedyTemperature =
      1e-5f;  // below it the division overflows before the distribution has any width
  static constexpr float kLogOfNothing = -88.0f;  // exp() of less is 0 in float
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  struct Candidate {
    float logit;
    int32_t token;
    float term;  // exp((logit - largest logit) / temperature)
  };
  static bool before(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  }
  // The tokens of a row that its steps have kept: candidates_, or the whole vocabulary if nothing is cut.
  struct Kept {
    const float* logits;  // (vocab,)
    int64_t count;        // counted as in llama.cpp: includes tokens that top_n_sigma removes
    bool whole = true;
    float scale = 1.0f;  // the product of 1 / temperature
    float shift = 0.0f;  // the largest logit at the last weigh()
  };

  void check(const ckdist_sampling& sampling, int32_t row) const;
  void check_steps(const ckdist_sampling& sampling, int32_t row) const;
  void check_tokens(const int32_t* tokens, int64_t count, const char* what, int32_t row) const;
  void scan(const float* logits, int32_t row);
  void rescan(int32_t row);
  [[noreturn]] static void fail_infinite(int32_t row);
  float largest() const;
  int32_t best(const float* logits) const;
  void gather(const float* logits, float threshold);
  float threshold_for(int64_t count);
  float threshold_of_mass(const float* logits, float low, float high, double target) const;
  void keep_top(const float* logits, int64_t count);
  void keep_first(int64_t count);
  double weigh(float shift, float scale);
  bool keep_mass(double target);
  void cut_mass(const float* logits, float shift, float scale, float temperature, float top_p, float least);
  const float* modify(const float* logits, const ckdist_sampling& sampling, int32_t row);
  bool keep_allowed(const float* logits, const ckdist_sampling& sampling, int32_t row);
  bool count_tokens(const ckdist_sampling& sampling, int32_t row);
  float penalised(float logit, int32_t token, const ckdist_sampling& sampling) const;
  void forget_tokens();
  const std::vector<Dry::Repetition>& repetitions(const ckdist_sampling& sampling, int32_t row);
  static float less_repetition(float logit, float scale, int32_t length, const ckdist_sampling& sampling);
  int32_t draw(const float* logits, const ckdist_sampling& sampling);
  int32_t draw_from_all(const float* logits, float shift, float scale, double uniform, double& total);

  // Keeps the candidates up to `last` in the order of `less`.
  template <class Less>
  void keep_until(const Candidate& last, Less less) {
    remove_if([&, cut = last](const Candidate& c) { return less(cut, c); });
  }
  template <class Test>
  void remove_if(Test test) {
    candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), test), candidates_.end());
  }
  // Finds the last candidate of the shortest prefix, in the order of `less`, whose terms sum to at least `target`.
  // Returns false if all terms together are less. Reorders selection_, a copy of the candidates.
  template <class Less>
  bool last_of_mass(double target, Less less, Candidate& last) {
    selection_ = candidates_;
    return last_of_selection(0.0, target, less, last);
  }
  // The same for selection_, after tokens with `mass`. Bisects with nth_element.
  template <class Less>
  bool last_of_selection(double mass, double target, Less less, Candidate& last) {
    size_t low = 0, high = selection_.size();
    while (high - low > 64) {
      const size_t middle = low + (high - low) / 2;
      std::nth_element(selection_.begin() + low, selection_.begin() + middle, selection_.begin() + high, less);
      double part = 0.0;
      for (size_t i = low; i < middle; ++i) part += selection_[i].term;
      if (mass + part >= target) {
        high = middle;
      } else {
        mass += part;
        low = middle;
      }
    }
    std::sort(selection_.begin() + low, selection_.begin() + high, less);
    for (size_t i = low; i < high; ++i) {
      mass += selection_[i].term;
      if (mass >= target) {
        last = selection_[i];
        return true;
      }
    }
    return false;
  }

  // Defined in sampler_steps.cpp.
  static bool has_steps(const ckdist_sampling& sampling) { return sampling.step_count > 0 || sampling.mirostat > 0; }
  int32_t take_steps(const float* logits, const ckdist_sampling& sampling, int32_t row, float& mu);
  void take_step(int32_t kind, Kept& kept, const ckdist_sampling& sampling, int32_t row);
  double weigh(Kept& kept);
  void gather_weighed(const Kept& kept, float threshold);
  void end_cut(Kept& kept) const;
  double mean_logit(const Kept& kept, double total) const;
  void edit(Kept& kept);
  float* find(Kept& kept, int32_t token);
  void keep_one(Kept& kept);
  template <class Less>
  void keep_mass(double target, int64_t min_keep, Less less);
  template <class Less>
  void keep_around(const Kept& kept, double centre, double target, Less nearer);
  void penalise(Kept& kept, const ckdist_sampling& sampling, int32_t row);
  void penalise_repetitions(Kept& kept, const ckdist_sampling& sampling, int32_t row);
  void set_temperature(Kept& kept, const ckdist_sampling& sampling);
  void cut_sigma(Kept& kept, double n);
  void cut_top_k(Kept& kept, int64_t count);
  void cut_typical(Kept& kept, double p, int64_t min_keep);
  void cut_top_p(Kept& kept, float p, int64_t min_keep);
  void cut_min_p(Kept& kept, double p, int64_t min_keep);
  void cut_xtc(Kept& kept, const ckdist_sampling& sampling);
  void cut_surprise(Kept& kept, double most);
  void cut_zipf(Kept& kept, double target);
  int32_t draw(Kept& kept, double uniform, double& probability);
  void fill_top(const float* logits, double log_normaliser, int32_t top, ckdist_sampled_token& out);
  double log_normaliser(const float* logits) const;

  const Kernels& kernels_;
  const int64_t vocab_;
  std::vector<float> maxima_;  // of the last scanned row, as written by ElementwiseKernel::maxima
  std::vector<float> selected_maxima_;
  std::vector<float> modified_;    // (vocab,)
  std::vector<uint32_t> allowed_;  // a mask with words for the whole vocabulary
  std::vector<float> terms_;       // a mask for the whole vocabulary
  std::vector<float> logits_of_candidates_;
  std::vector<float> terms_of_candidates_;
  std::vector<uint32_t> seen_;    // (vocab,): count in the output, and the bit kInPrompt
  std::vector<int32_t> touched_;  // tokens whose entry in seen_ is not 0
  std::vector<double> sums_;
  Dry dry_;
  std::vector<Candidate> candidates_;  // by ascending token
  std::vector<Candidate> selection_;
};

}  // namespace ckdist
