#include "runtime/dry.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace ckdist {
namespace {

// A trie of the breakers' bytes.
struct Node {
  std::array<int16_t, 256> child{};  // 0: no child
  uint64_t through = 0;              // breakers that begin with the bytes up to this node
  uint64_t ends = 0;                 // breakers that end at this node
  int depth = 0;
};

constexpr int64_t kMaxNodes = 1024;

using Trie = std::vector<Node>;

Trie trie_of(const uint8_t* breakers, const int64_t* begins, int count) {
  Trie trie(1);
  for (int b = 0; b < count; ++b) {
    const int64_t begin = begins[b], length = begins[b + 1] - begin;
    if (length < 1) fail(Status::config, "breaker %d of DRY is empty", b);
    int node = 0;
    for (int64_t i = 0; i < length; ++i) {
      const uint8_t byte = breakers[begin + i];
      if (!trie[node].child[byte]) {
        if (int64_t(trie.size()) == kMaxNodes)
          fail(Status::config, "the breakers of DRY have more than %lld bytes", (long long)kMaxNodes);
        trie[node].child[byte] = int16_t(trie.size());
        trie.emplace_back();
        trie.back().depth = int(i + 1);
      }
      node = trie[node].child[byte];
      trie[node].through |= uint64_t{1} << b;
    }
    trie[node].ends |= uint64_t{1} << b;
  }
  return trie;
}

// Returns the breakers inside the bytes [p, end). `partial` receives the nodes of breakers that begin there and end
// later.
uint64_t contained_in(const Trie& trie, const uint8_t* p, const uint8_t* end, std::vector<int>& partial) {
  uint64_t contained = 0;
  partial.clear();
  for (; p < end; ++p) {
    int node = trie[0].child[*p];
    if (!node) continue;
    const uint8_t* q = p;
    while (node) {
      contained |= trie[node].ends;
      if (++q == end) break;
      node = trie[node].child[*q];
    }
    if (node) partial.push_back(node);
  }
  return contained;
}

}  // namespace

DryBreakers::DryBreakers(const uint8_t* pieces, const int64_t* piece_begins, int64_t tokens, const uint8_t* breakers,
                         const int64_t* breaker_begins, int count, const int32_t* tails, const int64_t* tail_begins) {
  if (count < 0 || count > kMaxCount) fail(Status::config, "%d breakers of DRY are more than %d", count, kMaxCount);
  const Trie trie = trie_of(breakers, breaker_begins, count);
  std::vector<int64_t> first_tail(count);  // index of a breaker's longest proper suffix
  int64_t ends = 0;
  for (int b = 0; b < count; ++b) {
    first_tail[b] = ends;
    ends += breaker_begins[b + 1] - breaker_begins[b] - 1;
  }

  tails_.emplace_back();
  std::vector<int32_t> tail_of(ends, -1);  // index into tails_
  for (int64_t t = 0; t < ends; ++t) {
    std::vector<int32_t> tail(tails + tail_begins[t], tails + tail_begins[t + 1]);
    if (!tail.empty() && tail[0] == -1) continue;
    if (int64_t(tail.size()) > kMaxTail) tail.resize(kMaxTail);
    const auto same = std::find(tails_.begin(), tails_.end(), tail);
    tail_of[t] = int32_t(same - tails_.begin());
    if (same == tails_.end()) tails_.push_back(std::move(tail));
  }

  heads_.resize(tokens);
  std::vector<int> partial;  // nodes where the token's bytes end
  for (int64_t token = 0; token < tokens; ++token) {
    const uint64_t contained =
        contained_in(trie, pieces + piece_begins[token], pieces + piece_begins[token + 1], partial);
    if (!contained && partial.empty()) continue;
    const size_t begin = entries_.size();
    const auto add = [&](int32_t tail) {
      const auto same = [&](const Entry& e) { return e.tail == tail; };
      if (std::none_of(entries_.begin() + begin, entries_.end(), same)) entries_.push_back({int32_t(token), tail});
    };
    if (contained) add(0);
    for (const int node : partial)
      for (uint64_t left = trie[node].through & ~contained; left; left &= left - 1) {
        const int b = __builtin_ctzll(left);
        const int32_t tail = tail_of[first_tail[b] + trie[node].depth - 1];
        if (tail >= 0) add(tail);
      }
    heads_[token] = entries_.size() > begin;
  }
}

DryBreakers::Entries DryBreakers::entries_of(int32_t token) const {
  const auto less = [](const Entry& a, const Entry& b) { return a.head < b.head; };
  return std::equal_range(entries_.begin(), entries_.end(), Entry{token, 0}, less);
}

bool DryBreakers::is_breaker(int32_t token) const {
  if (!is_head(token)) return false;
  const auto [begin, end] = entries_of(token);
  return std::any_of(begin, end, [&](const Entry& e) { return tails_[e.tail].empty(); });
}

int64_t DryBreakers::longest_match(const std::vector<int32_t>& reversed, int64_t i) const {
  const int32_t token = reversed[i];
  if (!is_head(token)) return -1;
  int64_t longest = -1;
  const auto [begin, end] = entries_of(token);
  for (auto e = begin; e != end; ++e) {
    const auto& tail = tails_[e->tail];
    const int64_t length = int64_t(tail.size());
    if (length <= longest || length > i) continue;
    int64_t n = 0;
    while (n < length && tail[n] == reversed[i - 1 - n]) ++n;
    if (n == length) longest = length;
  }
  return longest;
}

const std::vector<Dry::Repetition>& Dry::find(const int32_t* prompt, int64_t prompt_count, const int32_t* output,
                                              int64_t output_count, int64_t window, int64_t allowed_length,
                                              const DryBreakers* breakers) {
  found_.clear();
  const int64_t all = prompt_count + output_count;
  const int64_t count = window < 0 ? all : std::min(window, all);
  if (count <= allowed_length) return found_;
  reversed_.resize(count);
  const int64_t of_output = std::min(count, output_count), of_prompt = count - of_output;
  std::reverse_copy(output + output_count - of_output, output + output_count, reversed_.begin());
  std::reverse_copy(prompt + prompt_count - of_prompt, prompt + prompt_count, reversed_.begin() + of_output);

  int64_t limit = count;  // tokens after the last breaker
  if (breakers)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t tail = breakers->longest_match(reversed_, i);
      if (tail < 0) continue;
      limit = i - tail;
      break;
    }
  if (limit < allowed_length) return found_;

  // Z function of the reversed text (Gusfield 1997, 1.4): [left, right) is the match found so far that reaches
  // farthest.
  common_.resize(count);
  common_[0] = int32_t(count);
  for (int64_t k = 1, left = 0, right = 0; k < count; ++k) {
    int64_t n = k < right ? std::min<int64_t>(right - k, common_[k - left]) : 0;
    if (k + n >= right) {
      while (k + n < count && reversed_[k + n] == reversed_[n]) ++n;
      left = k;
      right = k + n;
    }
    common_[k] = int32_t(n);
  }

  for (int64_t k = 1; k < count; ++k) {
    const int32_t length = int32_t(std::min<int64_t>(common_[k], limit));
    if (length < allowed_length) continue;
    const int32_t next = reversed_[k - 1];  // the token that came after the earlier occurrence
    if (longest_[next] == 0) found_.push_back({next, 0});
    longest_[next] = std::max(longest_[next], length + 1);
  }
  size_t kept = 0;
  for (const Repetition& r : found_) {
    const int32_t length = longest_[r.token] - 1;
    longest_[r.token] = 0;
    if (!breakers || !breakers->is_breaker(r.token)) found_[kept++] = {r.token, length};
  }
  found_.resize(kept);
  return found_;
}

double dry_penalty(float multiplier, float base, int64_t allowed_length, int64_t length) {
  int64_t exponent = length - allowed_length;
  if (base > 1.000001f) {
    const int64_t most = int64_t(std::log(std::numeric_limits<float>::max()) / std::log(base));
    if (most > 0) exponent = std::min(exponent, most);
  }
  return double(multiplier) * std::pow(double(base), double(exponent));
}

}  // namespace ckdist
