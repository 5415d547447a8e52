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

TEST_CASE("scores of the index are those of double precision, for any number of heads and blocks") {
  constexpr int kBlocks = 3;
  for (const KvType type : {KvType::f32, KvType::f16, KvType::i16})
    for (const int heads : {1, 7, 64})
      for (const bool weighed : {true, false}) {
        const int width = 48, each = weighed ? 1 : heads;
        const CacheShape cache = {type, type, width, width, true};
        const std::vector<float> q = random_floats(size_t(heads * width)), weights = random_floats(size_t(heads));
        const std::vector<float> keys = random_floats(size_t(kBlocks * kBlockTokens * width));
        for (const Level& level : levels()) {
          if (!level.lacks.empty()) continue;
          const AttentionKernel& kernel = level.kernels->attention;
          const size_t bytes = size_t(kernel.block_bytes(cache));
          std::vector<uint8_t> cached(kBlocks * bytes);
          const uint8_t* const blocks[kBlocks] = {cached.data(), cached.data() + bytes, cached.data() + 2 * bytes};
          for (int i = 0; i < kBlocks * kBlockTokens; i++)
            kernel.store(cache, cached.data() + size_t(i / kBlockTokens) * bytes, i % kBlockTokens,
                         keys.data() + i * width, nullptr);
          std::vector<int16_t> codes(size_t(heads * width));
          std::vector<float> scales(weights.size()), scores(size_t(kBlocks * each * kBlockTokens));
          kernel.index_codes(q.data(), width, heads, codes.data(), scales.data());
          const float* const factors = weighed ? weights.data() : nullptr;
          kernel.index_scores({type, width, heads, q.data(), factors, codes.data(), scales.data()}, blocks, kBlocks,
                              scores.data());
          std::vector<double> expected(scores.size());
          for (int i = 0; i < kBlocks * kBlockTokens; i++)
            for (int h = 0; h < heads; h++) {
              double dot = 0;
              for (int d = 0; d < width; d++) dot += double(q[size_t(h * width + d)]) * keys[size_t(i * width + d)];
              double& score = expected[size_t((i / kBlockTokens * each + h % each) * kBlockTokens + i % kBlockTokens)];
              score += weighed ? weights[size_t(h)] * std::max(dot, 0.0) : dot;
            }
          const double epsilon = type == KvType::f32 ? 1e-4 : type == KvType::i16 ? 5e-3 : 1e-2;
          for (size_t i = 0; i < scores.size(); i++)
            CHECK(scores[i] == doctest::Approx(expected[i]).epsilon(epsilon).scale(10));
        }
      }
}
