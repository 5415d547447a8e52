// Kernels of sparse attention: copies of single positions of the cache, and scores of the index.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/kernels.h"

using namespace ckdist;

namespace {
std::vector<float> random_floats(size_t n) {
  static std::mt19937 generator(7);
  std::vector<float> x(n);
  for (float& one : x) one = std::normal_distribution<float>()(generator);
  return x;
}
}  // namespace

TEST_CASE("a copied position has the bytes of one that was stored in its place") {
  for (const Level& level : levels()) {
    if (!level.lacks.empty()) continue;
    const AttentionKernel& kernel = level.kernels->attention;
    for (const KvType keys : {KvType::f32, KvType::f16, KvType::bf16, KvType::i16, KvType::q8_0})
      for (const KvType values : {KvType::f32, KvType::f16, KvType::bf16, KvType::i16, KvType::q8_0})
        for (const bool latent : {false, true})
          for (const int width : {64, 40}) {
            if (latent && keys != values) continue;
            const CacheShape cache = {keys, values, width + 16, width, latent};
            const size_t bytes = size_t(kernel.block_bytes(cache));
            std::vector<uint8_t> from(bytes), copied(bytes), stored(bytes);
            for (int slot = 0; slot < kBlockTokens; slot++) {
              const int to = (slot * 5 + 3) % kBlockTokens;
              const std::vector<float> k = random_floats(size_t(cache.key_width)), v = random_floats(size_t(width));
              kernel.store(cache, from.data(), slot, k.data(), v.data());
              kernel.store(cache, stored.data(), to, k.data(), v.data());
            }
            for (int slot = 0; slot < kBlockTokens; slot++)
              kernel.copy(cache, from.data(), slot, copied.data(), (slot * 5 + 3) % kBlockTokens);
            CAPTURE(level.kernels->name);
            CAPTURE(int(keys));
            CAPTURE(int(values));
            CAPTURE(latent);
            CHECK(std::memcmp(copied.data(), stored.data(), bytes) == 0);
          }
  }
}

TEST_CASE("scores of the index are those of double precision, for any number of heads") {
  for (const KvType type : {KvType::f32, KvType::f16})
    for (const int heads : {1, 7, 64}) {
      const int width = 48;
      const CacheShape cache = {type, type, width, width, true};
      const std::vector<float> q = random_floats(size_t(heads * width)), weights = random_floats(size_t(heads));
      const std::vector<float> keys = random_floats(size_t(kBlockTokens * width));
      for (const Level& level : levels()) {
        if (!level.lacks.empty()) continue;
        const AttentionKernel& kernel = level.kernels->attention;
        std::vector<uint8_t> block(size_t(kernel.block_bytes(cache)));
        for (int slot = 0; slot < kBlockTokens; slot++)
          kernel.store(cache, block.data(), slot, keys.data() + slot * width, nullptr);
        std::vector<float> scores(kBlockTokens);
        kernel.index_scores({type, width, heads, q.data(), weights.data()}, block.data(), scores.data());
        for (int i = 0; i < kBlockTokens; i++) {
          double expected = 0;
          for (int h = 0; h < heads; h++) {
            double dot = 0;
            for (int d = 0; d < width; d++) dot += double(q[size_t(h * width + d)]) * keys[size_t(i * width + d)];
            expected += weights[size_t(h)] * std::max(dot, 0.0);
          }
          CHECK(scores[size_t(i)] == doctest::Approx(expected).epsilon(type == KvType::f32 ? 1e-4 : 1e-2).scale(10));
        }
      }
    }
}
