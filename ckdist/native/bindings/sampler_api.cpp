#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "bindings/pool_handle.h"
#include "core/error.h"
#include "runtime/sampler.h"

using ckdist::guard;
using ckdist::Sampler;

struct ckdist_sampler {
  static constexpr int kRowsEach = 2, kMostThreads = 16;  // a call of the pool takes as long as a greedy row

  const int64_t vocab;
  const std::weak_ptr<ckdist::Pool> pool;
  std::vector<std::unique_ptr<Sampler>> samplers;  // of each thread that has sampled

  ckdist_sampler(int64_t vocab, std::weak_ptr<ckdist::Pool> pool) : vocab(vocab), pool(std::move(pool)) { reserve(1); }
  void reserve(size_t threads) {
    while (samplers.size() < threads) samplers.push_back(std::make_unique<Sampler>(ckdist::kernels(), vocab));
  }

  // Runs body(sampler, row) for every row. If rows fail, throws the error of the first of them.
  template <class Body>
  void each_row(int32_t rows, Body&& body) {
    const std::shared_ptr<ckdist::Pool> threads = pool.lock();
    const int count = threads ? std::min({threads->size(), rows / kRowsEach, kMostThreads}) : 1;
    if (count <= 1) {
      for (int32_t row = 0; row < rows; ++row) body(*samplers[0], row);
      return;
    }
    reserve(size_t(count));
    std::atomic<int32_t> next{0};
    std::mutex lock;
    int32_t failed = rows;
    std::exception_ptr failure;
    threads->run(count, [&](int thread) {
      for (int32_t row; (row = next++) < rows;) try {
          body(*samplers[thread], row);
        } catch (...) {  // the pool could not be used again
          const std::lock_guard<std::mutex> hold(lock);
          if (row < failed) failed = row, failure = std::current_exception();
          next = rows;
        }
    });
    if (failure) std::rethrow_exception(failure);
  }
};

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

struct ckdist_sampler* ckdist_sampler_open(int64_t vocab, const struct ckdist_pool* pool) {
  ckdist_sampler* opened = nullptr;
  guard([&] { opened = new ckdist_sampler(vocab, pool ? pool->pool : nullptr); });
  return opened;
}

void ckdist_sampler_close(struct ckdist_sampler* sampler) { delete sampler; }

int32_t ckdist_sample(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                      const struct ckdist_sampling* sampling, struct ckdist_sampled_token* out) {
  return guard([&] {
    sampler->each_row(
        rows, [&](Sampler& own, int32_t row) { own.sample(logits + row * row_stride, row, sampling[row], out[row]); });
  });
}

int32_t ckdist_sample_greedy(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                             int32_t* tokens) {
  return guard([&] {
    sampler->each_row(rows,
                      [&](Sampler& own, int32_t row) { tokens[row] = own.greedy(logits + row * row_stride, row); });
  });
}

int32_t ckdist_logprobs(struct ckdist_sampler* sampler, const float* logits, int64_t row_stride, int32_t rows,
                        const int32_t* targets, int32_t top, struct ckdist_sampled_token* out) {
  return guard([&] {
    sampler->each_row(rows, [&](Sampler& own, int32_t row) {
      own.logprobs(logits + row * row_stride, row, targets[row], top, out[row]);
    });
  });
}
