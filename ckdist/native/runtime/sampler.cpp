#include "runtime/sampler.h"

#include <cmath>

#include "core/error.h"

namespace ckdist {
namespace {

constexpr int32_t kMaxTop = 20;
static_assert(sizeof(ckdist_sampled_token::top_tokens) == kMaxTop * sizeof(int32_t), "room for all alternatives");
constexpr uint32_t kInPrompt = 1u << 31;
constexpr int64_t kLikelyEnough = 256;  // top_p is first searched among this many tokens
constexpr int kHalvings = 10;           // of the range of logits, if those tokens are not enough
constexpr int64_t kDrawSpan = 4096;

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

double uniform_draw(uint64_t seed, int64_t position) {
  constexpr uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t bits = mix(mix(seed + golden) + golden * (uint64_t(position) + 1));
  return (double(bits >> 11) + 0.5) * 0x1p-53;
}

Sampler::Sampler(const Kernels& kernels, int64_t vocab) : kernels_(kernels), vocab_(vocab) {
  if (vocab < 1 || vocab > (int64_t{1} << 28))
    fail(Status::config, "a vocabulary of %lld tokens is not between 1 and 2^28", (long long)vocab);
  dry_.resize(vocab);
  maxima_.resize(max_count(vocab));
  seen_.resize(vocab);
}

void Sampler::check(const ckdist_sampling& s, int32_t row) const {
  const auto require = [&](bool good, const char* name, double value, const char* range) {
    if (!good) fail(Status::config, "%s (%g) of row %d must be %s", name, value, row, range);
  };
  require(s.temperature >= 0 && s.temperature < kInfinity, "temperature", s.temperature, "finite and at least 0");
  require(s.top_p >= 0 && s.top_p <= 1, "top_p", s.top_p, "from 0 to 1");
  require(s.min_p >= 0 && s.min_p <= 1, "min_p", s.min_p, "from 0 to 1");
  require(s.repetition_penalty > 0 && s.repetition_penalty < kInfinity, "repetition_penalty", s.repetition_penalty,
          "finite and above 0");
  require(std::isfinite(s.presence_penalty), "presence_penalty", s.presence_penalty, "finite");
  require(std::isfinite(s.frequency_penalty), "frequency_penalty", s.frequency_penalty, "finite");
  require(s.dry_multiplier >= 0 && s.dry_multiplier < kInfinity, "dry_multiplier", s.dry_multiplier,
          "finite and at least 0");
  if (s.dry_multiplier > 0) {
    require(s.dry_base >= 1 && s.dry_base < kInfinity, "dry_base", s.dry_base, "finite and at least 1");
    require(s.dry_allowed_length >= 0, "dry_allowed_length", s.dry_allowed_length, "at least 0");
  }
  require(s.top_logprobs >= -1 && s.top_logprobs <= kMaxTop, "logprobs", s.top_logprobs, "at most 20");
}

void Sampler::check_tokens(const int32_t* tokens, int64_t count, const char* what, int32_t row) const {
  for (int64_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab_)
      fail(Status::config, "token %d in the %s of row %d is not in the vocabulary of %lld", tokens[i], what, row,
           (long long)vocab_);
}

void Sampler::scan(const float* logits, int32_t row) {
  if (!kernels_.elementwise.maxima(logits, vocab_, maxima_.data()))
    fail(Status::native, "logits of row %d are not finite: the model's weights or activations overflowed", row);
}

float Sampler::largest() const { return *std::max_element(maxima_.begin(), maxima_.end()); }

int32_t Sampler::best(const float* logits) const {
  const float value = largest();
  for (int64_t span = 0; span < vocab_; span += kMaxSpan) {
    const float* m = maxima_.data() + span / kMaxSpan * 16;
    if (std::find(m, m + 16, value) == m + 16) continue;
    const float* end = logits + std::min(span + kMaxSpan, vocab_);
    return int32_t(std::find(logits + span, end, value) - logits);
  }
  return 0;
}

// Sets candidates_ to the tokens whose logit is at least `threshold`. Skips spans whose maxima are lower.
void Sampler::gather(const float* logits, float threshold) {
  candidates_.clear();
  for (int64_t span = 0; span < vocab_; span += kMaxSpan) {
    const float* m = maxima_.data() + span / kMaxSpan * 16;
    int lanes[16], hits = 0;
    for (int lane = 0; lane < 16; ++lane)
      if (m[lane] >= threshold) lanes[hits++] = lane;
    if (!hits) continue;
    const int64_t end = std::min(span + kMaxSpan, vocab_);
    for (int64_t i = span; i < end; i += 16)
      for (int hit = 0; hit < hits; ++hit) {
        const int64_t token = i + lanes[hit];
        if (token < end && logits[token] >= threshold) candidates_.push_back({logits[token], int32_t(token), 0.0f});
      }
  }
}

// Returns a logit that at least `count` tokens reach: at least `count` of the maxima reach it.
float Sampler::threshold_for(int64_t count) {
  if (count > int64_t(maxima_.size())) return -kInfinity;
  selected_maxima_ = maxima_;
  const auto nth = selected_maxima_.begin() + (count - 1);
  std::nth_element(selected_maxima_.begin(), nth, selected_maxima_.end(), std::greater<float>());
  return *nth;
}

// Bisects for a logit from `low` on: tokens with at least this logit have a mass (in terms_) of at least `target`, and
// few others are included.
float Sampler::threshold_of_mass(const float* logits, float low, float high, double target) const {
  for (int i = 0; i < kHalvings; ++i) {
    const float middle = low + (high - low) / 2;
    if (kernels_.elementwise.sum_at_least(logits, terms_.data(), vocab_, middle) >= target) low = middle;
    else high = middle;
  }
  return low;
}

// Sets candidates_ to exactly the first `count` tokens of the order.
void Sampler::keep_top(const float* logits, int64_t count) {
  gather(logits, threshold_for(count));
  keep_first(count);
}

// Keeps the first `count` candidates of the order.
void Sampler::keep_first(int64_t count) {
  if (int64_t(candidates_.size()) <= count) return;
  selection_ = candidates_;
  const auto nth = selection_.begin() + (count - 1);
  std::nth_element(selection_.begin(), nth, selection_.end(), before);
  keep_until(*nth, before);
}

// Computes the candidates' terms and returns their sum.
double Sampler::weigh(float shift, float scale) {
  logits_of_candidates_.resize(candidates_.size());
  terms_of_candidates_.resize(candidates_.size());
  for (size_t i = 0; i < candidates_.size(); ++i) logits_of_candidates_[i] = candidates_[i].logit;
  const double sum = kernels_.elementwise.sum_exp(logits_of_candidates_.data(), int64_t(candidates_.size()), shift,
                                                  scale, terms_of_candidates_.data());
  for (size_t i = 0; i < candidates_.size(); ++i) candidates_[i].term = terms_of_candidates_[i];
  return sum;
}

// Keeps the shortest prefix whose terms sum to at least `target`. Returns false if the sum of all terms is less.
bool Sampler::keep_mass(double target) {
  Candidate last;
  if (!last_of_mass(target, before, last)) return false;
  keep_until(last, before);
  return true;
}

// Sets candidates_ to the first tokens of the whole vocabulary whose probabilities sum to `top_p`, without logits below
// `least`.
void Sampler::cut_mass(const float* logits, float shift, float scale, float temperature, float top_p, float least) {
  terms_.resize(vocab_);
  const double target = top_p * kernels_.elementwise.sum_exp(logits, vocab_, shift, scale, terms_.data());
  const float likely = threshold_for(kLikelyEnough);
  gather(logits, std::max(likely, least));
  weigh(shift, scale);
  if (!keep_mass(target) && likely > least) {
    const float nothing = std::max(shift + kLogOfNothing * temperature, kRemoved);
    gather(logits, std::max(threshold_of_mass(logits, nothing, shift, target), least));
    weigh(shift, scale);
    keep_mass(target);
  }
}

// Fills seen_ and touched_ with the tokens that penalties count. Returns false if no penalty is set.
bool Sampler::count_tokens(const ckdist_sampling& s, int32_t row) {
  const bool repetition = s.repetition_penalty != 1.0f;
  const bool counts = s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
  if (!repetition && !counts) return false;
  const auto touch = [&](int32_t token) -> uint32_t& {
    if (!seen_[token]) touched_.push_back(token);
    return seen_[token];
  };
  int64_t of_prompt = repetition ? s.prompt_count : 0, of_output = s.output_count;
  if (s.penalty_window > 0) {
    of_output = std::min(s.output_count, s.penalty_window);
    of_prompt = std::min(s.prompt_count, s.penalty_window - of_output);
  }
  const int32_t* prompt = s.prompt_tokens + (s.prompt_count - of_prompt);
  const int32_t* output = s.output_tokens + (s.output_count - of_output);
  check_tokens(prompt, of_prompt, "prompt", row);
  check_tokens(output, of_output, "output", row);
  for (int64_t i = 0; i < of_prompt; ++i) {
    uint32_t& seen = touch(prompt[i]);
    seen = s.penalty_window > 0 ? seen + 1 : seen | kInPrompt;
  }
  for (int64_t i = 0; i < of_output; ++i) touch(output[i]) += 1;
  return of_prompt + of_output > 0;
}

void Sampler::forget_tokens() {
  for (const int32_t token : touched_) seen_[token] = 0;
  touched_.clear();
}

float Sampler::penalised(float x, int32_t token, const ckdist_sampling& s) const {
  const uint32_t count = seen_[token] & ~kInPrompt;
  x = x > 0.0f ? x / s.repetition_penalty : x * s.repetition_penalty;
  if (count) x -= s.presence_penalty + s.frequency_penalty * float(count);
  return x;
}

const std::vector<Dry::Repetition>& Sampler::repetitions(const ckdist_sampling& s, int32_t row) {
  check_tokens(s.prompt_tokens, s.prompt_count, "prompt", row);
  check_tokens(s.output_tokens, s.output_count, "output", row);
  return dry_.find(s.prompt_tokens, s.prompt_count, s.output_tokens, s.output_count, s.dry_window, s.dry_allowed_length,
                   s.dry_breakers);
}

// The logit of a token that would continue a repetition of `length` tokens. `scale` as in Kept.
float Sampler::less_repetition(float logit, float scale, int32_t length, const ckdist_sampling& s) {
  const double penalty = dry_penalty(s.dry_multiplier, s.dry_base, s.dry_allowed_length, length) / scale;
  return float(std::max(logit - penalty, double(kRemoved)));
}

void Sampler::rescan(int32_t row) {
  if (!kernels_.elementwise.maxima(modified_.data(), vocab_, maxima_.data())) fail_infinite(row);
}

void Sampler::fail_infinite(int32_t row) {
  fail(Status::config, "logit_bias or penalties of row %d make logits infinite; use smaller ones", row);
}

// Sets modified_ to the `logits` that the mask (see ckdist_sampling) allows, and scans them. Returns false if a logit
// is not finite.
bool Sampler::keep_allowed(const float* logits, const ckdist_sampling& s, int32_t row) {
  const uint32_t* allowed = s.allowed;
  const int64_t words = (vocab_ + 31) / 32;
  if (s.allowed_words < words) {
    allowed_.assign(words, 0);
    std::copy_n(s.allowed, s.allowed_words, allowed_.begin());
    allowed = allowed_.data();
  }
  modified_.resize(vocab_);
  if (!kernels_.elementwise.maxima_allowed(logits, allowed, kRemoved, vocab_, modified_.data(), maxima_.data()))
    return false;
  if (largest() == kRemoved) fail(Status::config, "the mask of row %d allows no token", row);
  return true;
}

// Applies logit_bias, penalties and DRY, and removes banned and forbidden tokens. If a row has `steps`, these apply
// penalties and DRY. Returns `logits` itself if nothing changes, else modified_, scanned again.
const float* Sampler::modify(const float* logits, const ckdist_sampling& s, int32_t row) {
  check_tokens(s.bias_tokens, s.bias_count, "logit_bias", row);
  check_tokens(s.banned_tokens, s.banned_count, "banned tokens", row);
  const bool penalties = !has_steps(s) && count_tokens(s, row);
  const bool dry = !has_steps(s) && s.dry_multiplier > 0.0f;
  const bool edited = penalties || dry || s.bias_count + s.banned_count > 0;
  if (!edited && !s.allowed) return logits;
  if (edited) modified_.assign(logits, logits + vocab_);
  for (int64_t i = 0; i < s.bias_count; ++i) modified_[s.bias_tokens[i]] += s.bias_values[i];
  if (penalties)
    for (const int32_t token : touched_) modified_[token] = penalised(modified_[token], token, s);
  forget_tokens();
  if (dry)
    for (const auto& r : repetitions(s, row))
      modified_[r.token] = less_repetition(modified_[r.token], 1.0f, r.length, s);
  for (int64_t i = 0; i < s.banned_count; ++i) modified_[s.banned_tokens[i]] = kRemoved;
  if (!s.allowed) {
    rescan(row);
  } else if (!keep_allowed(edited ? modified_.data() : logits, s, row)) {
    scan(logits, row);  // fails if the original logits were not finite
    fail_infinite(row);
  }
  return modified_.data();
}

// Inverts the cumulative distribution over the whole vocabulary: first sums of spans, then the span of the draw.
int32_t Sampler::draw_from_all(const float* logits, float shift, float scale, double uniform, double& total) {
  const auto length = [&](int64_t start) { return std::min(kDrawSpan, vocab_ - start); };
  sums_.clear();
  total = 0.0;
  for (int64_t start = 0; start < vocab_; start += kDrawSpan) {
    sums_.push_back(kernels_.elementwise.sum_exp(logits + start, length(start), shift, scale, nullptr));
    total += sums_.back();
  }
  double left = uniform * total;
  size_t span = 0;
  while (span + 1 < sums_.size() && left >= sums_[span]) left -= sums_[span++];
  while (sums_[span] == 0.0) --span;  // rounding moved past the last span with any mass

  const int64_t start = int64_t(span) * kDrawSpan;
  terms_.resize(vocab_);
  kernels_.elementwise.sum_exp(logits + start, length(start), shift, scale, terms_.data());
  int64_t last = 0;
  for (int64_t i = 0; i < length(start); ++i) {
    if (terms_[i] == 0.0f) continue;
    last = i;
    left -= terms_[i];
    if (left < 0.0) break;
  }
  return int32_t(start + last);
}

int32_t Sampler::draw(const float* logits, const ckdist_sampling& s) {
  if (s.temperature < kGreedyTemperature) return best(logits);
  const float shift = largest(), scale = 1.0f / s.temperature;
  const double uniform = uniform_draw(s.seed, s.position);
  const bool top_k = s.top_k > 0 && s.top_k < vocab_, top_p = s.top_p < 1.0f, min_p = s.min_p > 0.0f;
  double total = 0.0;
  if (!top_k && !top_p && !min_p) return draw_from_all(logits, shift, scale, uniform, total);

  const float least = min_p ? shift + (std::log(s.min_p) - 0.01f) * s.temperature : -kInfinity;  // slightly below min_p
  if (top_k) {
    keep_top(logits, s.top_k);
    total = weigh(shift, scale);
    if (top_p) keep_mass(s.top_p * total);
  } else if (top_p) {
    cut_mass(logits, shift, scale, s.temperature, s.top_p, least);
  } else {
    gather(logits, least);
    weigh(shift, scale);
  }

  total = 0.0;
  for (const Candidate& c : candidates_)
    if (c.term >= s.min_p) total += c.term;
  double left = uniform * total;
  int32_t token = 0;
  for (const Candidate& c : candidates_) {
    if (c.term < s.min_p || c.term == 0.0f) continue;
    token = c.token;
    left -= c.term;
    if (left < 0.0) break;
  }
  return token;
}

double Sampler::log_normaliser(const float* logits) const {
  const float shift = largest();
  return shift + std::log(kernels_.elementwise.sum_exp(logits, vocab_, shift, 1.0f, nullptr));
}

void Sampler::fill_top(const float* logits, double log_normaliser, int32_t top, ckdist_sampled_token& out) {
  out.top_count = int32_t(std::min<int64_t>(top, vocab_));
  if (out.top_count == 0) return;
  keep_top(logits, out.top_count);
  std::sort(candidates_.begin(), candidates_.end(), before);
  for (int32_t i = 0; i < out.top_count; ++i) {
    out.top_tokens[i] = candidates_[i].token;
    out.top_logprobs[i] = float(candidates_[i].logit - log_normaliser);
  }
}

int32_t Sampler::greedy(const float* logits, int32_t row) {
  scan(logits, row);
  return best(logits);
}

void Sampler::sample(const float* logits, int32_t row, const ckdist_sampling& sampling, ckdist_sampled_token& out) {
  check(sampling, row);
  if (has_steps(sampling)) check_steps(sampling, row);
  if (!sampling.allowed || sampling.top_logprobs >= 0) scan(logits, row);  // else modify() scans with the mask
  out = {};
  double normaliser = 0.0;
  if (sampling.top_logprobs >= 0) {
    normaliser = log_normaliser(logits);
    fill_top(logits, normaliser, sampling.top_logprobs, out);
  }
  out.mirostat_mu = sampling.mirostat_mu;
  const float* modified = modify(logits, sampling, row);
  out.token = has_steps(sampling) ? take_steps(modified, sampling, row, out.mirostat_mu) : draw(modified, sampling);
  out.logprob = sampling.top_logprobs >= 0 ? float(logits[out.token] - normaliser) : std::nanf("");
}

void Sampler::logprobs(const float* logits, int32_t row, int32_t target, int32_t top, ckdist_sampled_token& out) {
  if (top < 0 || top > kMaxTop) fail(Status::config, "logprobs (%d) must be from 0 to %d", top, kMaxTop);
  check_tokens(&target, 1, "targets", row);
  scan(logits, row);
  out = {};
  const double normaliser = log_normaliser(logits);
  fill_top(logits, normaliser, top, out);
  out.token = target;
  out.logprob = float(logits[target] - normaliser);
}

}  // namespace ckdist
