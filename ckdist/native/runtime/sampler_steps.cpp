// The samplers of a row with `steps`, in the order of the row, with llama.cpp's definitions; and mirostat.
#include <cmath>
#include <iterator>

#include "core/error.h"
#include "runtime/sampler.h"

namespace ckdist {
namespace {

constexpr uint64_t kXtcStream = 0x5843545f64726177u;  // makes XTC's draw independent of the token's
constexpr int kTypicalHalvings = 12;                  // of the distance from the mean logit, in typical_p
constexpr int64_t kZipfTokens = 100;  // mirostat estimates the exponent of Zipf's law from this many tokens
constexpr int kLanes = 8;
constexpr double kLog2 = 0.6931471805599453;

}  // namespace

void Sampler::check_steps(const ckdist_sampling& s, int32_t row) const {
  const auto require = [&](bool good, const char* name, double value, const char* range) {
    if (!good) fail(Status::config, "%s (%g) of row %d must be %s", name, value, row, range);
  };
  require(s.typical_p >= 0 && s.typical_p <= 1, "typical_p", s.typical_p, "from 0 to 1");
  require(std::isfinite(s.top_n_sigma), "top_n_sigma", s.top_n_sigma, "finite");
  require(s.xtc_probability >= 0 && s.xtc_probability <= 1, "xtc_probability", s.xtc_probability, "from 0 to 1");
  require(s.xtc_threshold >= 0 && s.xtc_threshold <= 1, "xtc_threshold", s.xtc_threshold, "from 0 to 1");
  require(s.dynatemp_range >= 0 && s.dynatemp_range < kInfinity, "dynatemp_range", s.dynatemp_range,
          "finite and at least 0");
  require(s.dynatemp_exponent >= 0 && s.dynatemp_exponent < kInfinity, "dynatemp_exponent", s.dynatemp_exponent,
          "finite and at least 0");
  require(s.min_keep >= 0, "min_keep", s.min_keep, "at least 0");
  require(s.mirostat >= 0 && s.mirostat <= 2, "mirostat", s.mirostat, "0, 1 or 2");
  require(s.mirostat_tau >= 0 && s.mirostat_tau < kInfinity, "mirostat_tau", s.mirostat_tau, "finite and at least 0");
  require(s.mirostat_eta >= 0 && s.mirostat_eta < kInfinity, "mirostat_eta", s.mirostat_eta, "finite and at least 0");
  require(std::isfinite(s.mirostat_mu), "mirostat_mu", s.mirostat_mu, "finite");
  for (int32_t i = 0; i < s.step_count; ++i)
    require(s.steps[i] >= CKDIST_STEP_PENALTIES && s.steps[i] <= CKDIST_STEP_XTC, "steps", s.steps[i],
            "of enum ckdist_sampling_step");
}

int32_t Sampler::take_steps(const float* logits, const ckdist_sampling& s, int32_t row, float& mu) {
  Kept kept{logits, vocab_};
  for (int32_t i = 0; i < s.step_count; ++i) take_step(s.steps[i], kept, s, row);
  if (s.mirostat == 1) cut_zipf(kept, mu);
  if (s.mirostat == 2) cut_surprise(kept, mu);
  double probability = 1.0;
  const int32_t token = draw(kept, uniform_draw(s.seed, s.position), probability);
  if (s.mirostat) mu -= s.mirostat_eta * float(-std::log2(probability) - s.mirostat_tau);
  return token;
}

void Sampler::take_step(int32_t kind, Kept& kept, const ckdist_sampling& s, int32_t row) {
  switch (kind) {
    case CKDIST_STEP_PENALTIES: return penalise(kept, s, row);
    case CKDIST_STEP_DRY: return penalise_repetitions(kept, s, row);
    case CKDIST_STEP_TEMPERATURE: return set_temperature(kept, s);
    case CKDIST_STEP_TOP_N_SIGMA: return cut_sigma(kept, s.top_n_sigma);
    case CKDIST_STEP_TOP_K: return cut_top_k(kept, s.top_k);
    case CKDIST_STEP_TYPICAL_P: return cut_typical(kept, s.typical_p, s.min_keep);
    case CKDIST_STEP_TOP_P: return cut_top_p(kept, s.top_p, s.min_keep);
    case CKDIST_STEP_MIN_P: return cut_min_p(kept, s.min_p, s.min_keep);
    default: return cut_xtc(kept, s);
  }
}

// Computes terms_, or the candidates' terms, and returns their sum.
double Sampler::weigh(Kept& kept) {
  if (kept.whole) {
    kept.shift = largest();
    terms_.resize(vocab_);
    return kernels_.elementwise.sum_exp(kept.logits, vocab_, kept.shift, kept.scale, terms_.data());
  }
  kept.shift = kRemoved;
  for (const Candidate& c : candidates_) kept.shift = std::max(kept.shift, c.logit);
  return weigh(kept.shift, kept.scale);
}

// gather() with the terms of the last weigh(), which was of the whole vocabulary.
void Sampler::gather_weighed(const Kept& kept, float threshold) {
  gather(kept.logits, threshold);
  for (Candidate& c : candidates_) c.term = terms_[c.token];
}

void Sampler::end_cut(Kept& kept) const {
  kept.whole = false;
  kept.count = int64_t(candidates_.size());
}

// The expectation of logit - shift under the terms, with sum `total`.
double Sampler::mean_logit(const Kept& kept, double total) const {
  double sum = 0.0;
  if (kept.whole) {
    double lanes[kLanes] = {};
    const auto weighted = [&](int64_t i) {
      return terms_[i] == 0.0f ? 0.0 : double(terms_[i]) * (double(kept.logits[i]) - kept.shift);
    };
    int64_t i = 0;
    for (; i + kLanes <= vocab_; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += weighted(i + lane);
    for (; i < vocab_; ++i) sum += weighted(i);
    for (const double lane : lanes) sum += lane;
  } else {
    for (const Candidate& c : candidates_)
      if (c.term != 0.0f) sum += double(c.term) * (double(c.logit) - kept.shift);
  }
  return sum / total;
}

// Copies the logits of the whole vocabulary to modified_ for writing. The caller must scan them again.
void Sampler::edit(Kept& kept) {
  if (!kept.whole || kept.logits == modified_.data()) return;
  modified_.assign(kept.logits, kept.logits + vocab_);
  kept.logits = modified_.data();
}

// The address of a token's logit after edit(), or null if the token is filtered out or removed.
float* Sampler::find(Kept& kept, int32_t token) {
  if (kept.whole) return modified_[token] == kRemoved ? nullptr : &modified_[token];
  const auto less = [](const Candidate& c, int32_t t) { return c.token < t; };
  const auto c = std::lower_bound(candidates_.begin(), candidates_.end(), token, less);
  return c == candidates_.end() || c->token != token || c->logit == kRemoved ? nullptr : &c->logit;
}

void Sampler::penalise(Kept& kept, const ckdist_sampling& s, int32_t row) {
  if (!count_tokens(s, row)) return;
  edit(kept);
  bool finite = true;
  for (const int32_t token : touched_)
    if (float* logit = find(kept, token)) {
      *logit = penalised(*logit * kept.scale, token, s) / kept.scale;
      finite = finite && std::isfinite(*logit);
    }
  forget_tokens();
  if (!finite) fail_infinite(row);
  if (kept.whole) rescan(row);
}

void Sampler::penalise_repetitions(Kept& kept, const ckdist_sampling& s, int32_t row) {
  const auto& found = repetitions(s, row);
  if (found.empty()) return;
  edit(kept);
  for (const auto& r : found)
    if (float* logit = find(kept, r.token)) *logit = less_repetition(*logit, kept.scale, r.length, s);
  if (kept.whole) rescan(row);
}

void Sampler::keep_one(Kept& kept) {
  if (kept.whole) {
    const int32_t token = best(kept.logits);
    candidates_.assign(1, {kept.logits[token], token, 1.0f});
  } else {
    keep_first(1);
  }
  kept.whole = false;
  kept.count = 1;
}

// Applies the temperature. A dynamic temperature is a power of the entropy, normalised by the entropy of the uniform
// distribution.
void Sampler::set_temperature(Kept& kept, const ckdist_sampling& s) {
  float temperature = s.temperature;
  if (s.dynatemp_range > 0.0f) {
    if (kept.count <= 1) return;
    const double total = weigh(kept);
    const double entropy = std::log(total) - mean_logit(kept, total) * kept.scale;
    const double normalised = std::max(0.0, entropy / std::log(double(kept.count)));
    const double low = std::max(0.0f, s.temperature - s.dynatemp_range), high = s.temperature + s.dynatemp_range;
    temperature = float(low + (high - low) * std::pow(normalised, double(s.dynatemp_exponent)));
  }
  if (temperature < kGreedyTemperature) keep_one(kept);
  else kept.scale *= 1.0f / temperature;
}

// Keeps logits within n standard deviations of the largest (Tang et al. 2024, arXiv:2411.07641).
void Sampler::cut_sigma(Kept& kept, double n) {
  if (n <= 0.0 || kept.count <= 1) return;
  double sum[kLanes] = {}, squares[kLanes] = {}, counts[kLanes] = {};
  if (!kept.whole) weigh(kept);
  const double shift = kept.whole ? largest() : kept.shift;
  const auto add = [&](float logit, int lane) {
    const double x = logit == kRemoved ? 0.0 : logit - shift;
    sum[lane] += x;
    squares[lane] += x * x;
    counts[lane] += logit == kRemoved ? 0.0 : 1.0;
  };
  if (kept.whole) {
    int64_t i = 0;
    for (; i + kLanes <= vocab_; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) add(kept.logits[i + lane], lane);
    for (; i < vocab_; ++i) add(kept.logits[i], 0);
  } else {
    for (const Candidate& c : candidates_) add(c.logit, 0);
  }
  for (int lane = 1; lane < kLanes; ++lane) sum[0] += sum[lane], squares[0] += squares[lane], counts[0] += counts[lane];
  const double mean = sum[0] / counts[0];
  const double deviation = std::sqrt(std::max(0.0, squares[0] / counts[0] - mean * mean));
  constexpr double least = -double(std::numeric_limits<float>::max());
  const float cut = std::max(float(std::max(shift - n * deviation, least)), std::nextafter(kRemoved, 0.0f));
  if (kept.whole) gather(kept.logits, cut);
  else remove_if([&](const Candidate& c) { return c.logit < cut; });
  kept.whole = false;
}

void Sampler::cut_top_k(Kept& kept, int64_t count) {
  if (count <= 0 || count >= kept.count) return;
  if (kept.whole) keep_top(kept.logits, count);
  else keep_first(count);
  kept.whole = false;
  kept.count = count;
}

// Keeps the shortest prefix in the order of `less` with terms of at least `target`, and at least `min_keep` tokens.
template <class Less>
void Sampler::keep_mass(double target, int64_t min_keep, Less less) {
  Candidate last;
  if (!last_of_mass(target, less, last)) return;
  if (min_keep > 1) {
    if (min_keep >= int64_t(selection_.size())) return;
    const auto nth = selection_.begin() + (min_keep - 1);
    std::nth_element(selection_.begin(), nth, selection_.end(), less);
    if (less(last, *nth)) last = *nth;
  }
  keep_until(last, less);
}

// Keeps the tokens whose surprise is nearest to the entropy (Meister et al. 2022, arXiv:2202.00666). Surprise minus
// entropy is the expected logit minus the token's logit. So these are the tokens around one logit.
void Sampler::cut_typical(Kept& kept, double p, int64_t min_keep) {
  if (p >= 1.0) return;
  const double total = weigh(kept);
  const double centre = kept.shift + mean_logit(kept, total);
  const double target = std::nextafter(p * total, HUGE_VAL);  // llama.cpp requires a sum greater than p
  const auto distance = [&](const Candidate& c) { return std::fabs(c.logit - centre); };
  const auto nearer = [&](const Candidate& a, const Candidate& b) {
    return distance(a) < distance(b) || (distance(a) == distance(b) && before(a, b));
  };
  if (kept.whole && min_keep <= 1) {
    keep_around(kept, centre, target, nearer);
  } else {
    if (kept.whole) gather_weighed(kept, kRemoved);
    keep_mass(target, min_keep, nearer);
  }
  end_cut(kept);
}

// Keeps the tokens nearest to `centre` whose terms sum to `target`: bisects the distance until few tokens are left to
// sort.
template <class Less>
void Sampler::keep_around(const Kept& kept, double centre, double target, Less nearer) {
  const float nothing = std::max(kept.shift + kLogOfNothing / kept.scale, kRemoved);
  double low = 0.0, high = std::max(kept.shift - centre, centre - nothing);
  const auto mass_from = [&](double logit) {
    if (logit > kept.shift) return 0.0;
    return kernels_.elementwise.sum_at_least(kept.logits, terms_.data(), vocab_, float(logit));
  };
  for (int i = 0; i < kTypicalHalvings; ++i) {
    const double middle = low + (high - low) / 2;
    if (mass_from(centre - middle) - mass_from(centre + middle) >= target) high = middle;
    else low = middle;
  }
  const double rounding = 1e-6 * (1.0 + std::fabs(centre) + high);  // rounding error of logits in float
  gather(kept.logits, float(std::max(centre - high - rounding, double(kRemoved))));
  remove_if([&](const Candidate& c) { return c.logit > centre + high + rounding; });
  selection_.clear();
  double mass = 0.0;  // of the tokens that are certainly kept
  for (Candidate& c : candidates_) {
    c.term = terms_[c.token];
    if (std::fabs(c.logit - centre) < low - rounding) mass += c.term;
    else selection_.push_back(c);
  }
  Candidate last;
  if (last_of_selection(mass, target, nearer, last)) keep_until(last, nearer);
}

void Sampler::cut_top_p(Kept& kept, float p, int64_t min_keep) {
  if (p >= 1.0f) return;
  if (!kept.whole) {
    keep_mass(p * weigh(kept), min_keep, before);
  } else {
    cut_mass(kept.logits, largest(), kept.scale, 1.0f / kept.scale, p, -kInfinity);
    if (int64_t(candidates_.size()) < min_keep) keep_top(kept.logits, min_keep);
  }
  end_cut(kept);
}

void Sampler::cut_min_p(Kept& kept, double p, int64_t min_keep) {
  if (p <= 0.0) return;
  if (kept.whole) kept.shift = largest();
  else weigh(kept);
  const float cut = float(kept.shift + std::log(p) / kept.scale);
  if (kept.whole) {
    gather(kept.logits, cut);
    if (int64_t(candidates_.size()) < min_keep) keep_top(kept.logits, min_keep);
  } else {
    const auto below = [&](const Candidate& c) { return c.logit < cut; };
    const int64_t removed = std::count_if(candidates_.begin(), candidates_.end(), below);
    if (int64_t(candidates_.size()) - removed < min_keep) keep_first(min_keep);
    else remove_if(below);
  }
  end_cut(kept);
}

// Exclude top choices (p-e-w 2024): with a given probability, removes all tokens of at least `threshold` except the
// least likely of them.
void Sampler::cut_xtc(Kept& kept, const ckdist_sampling& s) {
  if (s.xtc_probability <= 0.0f || s.xtc_threshold > 0.5f || kept.count < 2) return;
  if (uniform_draw(s.seed ^ kXtcStream, s.position) > s.xtc_probability) return;
  const double least = double(s.xtc_threshold) * weigh(kept);
  if (kept.whole)
    gather_weighed(kept, least > 0.0 ? float(kept.shift + (std::log(least) - 0.01) / kept.scale) : -kInfinity);
  const auto likely = [&](const Candidate& c) { return c.term >= least && c.term > 0.0f; };
  selection_.clear();
  std::copy_if(candidates_.begin(), candidates_.end(), std::back_inserter(selection_), likely);
  const int64_t removed = int64_t(selection_.size()) - 1;
  if (removed < 1 || kept.count - removed < s.min_keep) return;
  const Candidate last = *std::max_element(selection_.begin(), selection_.end(), before);
  if (kept.whole) {
    edit(kept);
    for (const Candidate& c : selection_)
      if (c.token != last.token) modified_[c.token] = kRemoved;
    kernels_.elementwise.maxima(modified_.data(), vocab_, maxima_.data());
  } else {
    remove_if([&](const Candidate& c) { return before(c, last); });
  }
  kept.count -= removed;
}

// Mirostat 2.0 (Basu et al. 2021, arXiv:2007.14966): keeps tokens with a surprise of at most `most` bits, and at least
// one token.
void Sampler::cut_surprise(Kept& kept, double most) {
  const double total = weigh(kept);
  if (kept.whole) {
    const double logit = kept.shift + (std::log(total) - most * kLog2 - 0.01) / kept.scale;
    gather_weighed(kept, float(std::max(logit, double(kRemoved))));
  }
  const auto surprising = [&](const Candidate& c) { return c.term == 0.0f || std::log2(total / c.term) > most; };
  if (std::all_of(candidates_.begin(), candidates_.end(), surprising)) return keep_one(kept);
  remove_if(surprising);
  kept.whole = false;
}

// Mirostat 1 (the same paper, algorithm 1): keeps k tokens, so that the surprise is `target` bits under Zipf's law. The
// exponent is estimated from the most likely tokens.
void Sampler::cut_zipf(Kept& kept, double target) {
  if (!kept.whole || vocab_ == 1) return;
  keep_top(kept.logits, std::min(kZipfTokens, vocab_));
  std::sort(candidates_.begin(), candidates_.end(), before);
  double products = 0.0, squares = 0.0;
  for (size_t i = 0; i + 1 < candidates_.size(); ++i) {
    const double t = std::log(double(i + 2) / double(i + 1));
    products += t * (double(candidates_[i].logit) - candidates_[i + 1].logit) * kept.scale;
    squares += t * t;
  }
  const double exponent = products / squares, excess = exponent - 1.0;
  const double inverse_sum =
      std::fabs(excess) < 1e-6 ? 1.0 / std::log(double(vocab_)) : excess / (1.0 - std::pow(double(vocab_), -excess));
  const double count = std::pow(inverse_sum * std::exp2(target), 1.0 / exponent);
  if (!(count < double(vocab_))) return;  // infinite for a flat distribution
  cut_top_k(kept, std::max<int64_t>(1, int64_t(count)));
}

// Draws a token. Sets `probability` to its probability among the kept tokens.
int32_t Sampler::draw(Kept& kept, double uniform, double& probability) {
  if (kept.whole) {
    double total = 0.0;
    kept.shift = largest();
    const int32_t token = draw_from_all(kept.logits, kept.shift, kept.scale, uniform, total);
    probability = std::exp((double(kept.logits[token]) - kept.shift) * kept.scale) / total;
    return token;
  }
  const double total = weigh(kept);
  double left = uniform * total;
  int32_t token = 0;
  for (const Candidate& c : candidates_) {
    if (c.term == 0.0f) continue;
    token = c.token;
    probability = c.term / total;
    left -= c.term;
    if (left < 0.0) break;
  }
  return token;
}

}  // namespace ckdist
