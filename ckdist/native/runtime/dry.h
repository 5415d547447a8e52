// DRY ("don't repeat yourself", p-e-w 2024): penalizes tokens that would continue a repetition of the text's end. The
// penalty grows exponentially with the length of the repetition. The definitions are llama.cpp's.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "api/sampler_api.h"

namespace ckdist {

// Strings that end a repetition, as tokens: a head, and the tail that must follow it.
class DryBreakers {
 public:
  static constexpr int kMaxCount = 64;
  static constexpr int64_t kMaxTail = 20;  // tokens

  // Arguments as in ckdist_dry_breakers_open. Throws Error if there are too many breakers, or one is empty.
  DryBreakers(const uint8_t* pieces, const int64_t* piece_begins, int64_t tokens, const uint8_t* breakers,
              const int64_t* breaker_begins, int count, const int32_t* tails, const int64_t* tail_begins);

  struct Entry {
    int32_t head;
    int32_t tail;  // index into tails_; 0: empty
  };
  const std::vector<Entry>& entries() const { return entries_; }
  int64_t tail_length(const Entry& entry) const { return int64_t(tails_[entry.tail].size()); }
  bool is_head(int32_t token) const { return token < int64_t(heads_.size()) && heads_[token]; }
  // True if the token's bytes contain a breaker.
  bool is_breaker(int32_t token) const;
  // The length of the longest tail that follows the head at reversed[i] (reversed[0] is the last token), or -1.
  int64_t longest_match(const std::vector<int32_t>& reversed, int64_t i) const;

 private:
  using Entries = std::pair<std::vector<Entry>::const_iterator, std::vector<Entry>::const_iterator>;
  Entries entries_of(int32_t token) const;  // those whose head the token is

  std::vector<std::vector<int32_t>> tails_;
  std::vector<Entry> entries_;  // by ascending head, without duplicates
  std::vector<bool> heads_;     // by token
};

class Dry {
 public:
  void resize(int64_t vocab) { longest_.resize(vocab); }

  struct Repetition {
    int32_t token;
    int32_t length;  // tokens of the repetition that this token would continue
  };
  // The tokens that would continue a repetition of at least `allowed_length` tokens. Searches the last `window` tokens
  // (-1: all) of prompt and output; repetitions do not cross breakers. Linear in the window. Tokens must be in the
  // vocabulary.
  const std::vector<Repetition>& find(const int32_t* prompt, int64_t prompt_count, const int32_t* output,
                                      int64_t output_count, int64_t window, int64_t allowed_length,
                                      const DryBreakers* breakers);

 private:
  std::vector<int32_t> longest_;   // (vocab,): all zero between calls
  std::vector<int32_t> reversed_;  // the window, last token first
  std::vector<int32_t> common_;    // [k]: length of the common prefix of reversed_[k..] and reversed_[0..]
  std::vector<Repetition> found_;
};

// multiplier * base^(length - allowed_length). The exponent is bounded so that the power is finite.
double dry_penalty(float multiplier, float base, int64_t allowed_length, int64_t length);

}  // namespace ckdist

struct ckdist_dry_breakers : ckdist::DryBreakers {
  using DryBreakers::DryBreakers;
};
