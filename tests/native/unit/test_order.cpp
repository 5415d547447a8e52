// Only ranks and hosts determine the order of sums: folding hosts one by one gives the bits of folding all ranks.
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "comm/algorithms/order.h"
#include "core/error.h"
#include "kernels/half.h"

using namespace ckdist;

namespace {

using Floats = std::vector<float>;

std::vector<Floats> random_parts(int ranks, int64_t n) {
  std::mt19937 bits(ranks);
  std::normal_distribution<float> normal;
  std::vector<Floats> parts(ranks, Floats(n));
  for (auto& part : parts)
    for (auto& x : part) x = normal(bits) * 100;
  return parts;
}

Floats summed(const std::vector<Floats>& parts, const std::vector<int>& of) {
  Floats sum = parts[of[0]];
  for (size_t r = 1; r < of.size(); r++)
    for (size_t i = 0; i < sum.size(); i++) sum[i] += parts[of[r]][i];
  return sum;
}

}  // namespace

TEST_CASE("hosts come in the order of their lowest rank, ranks of a host in theirs") {
  const Order order({7, 3, 7, 3, 9});
  REQUIRE(order.hosts() == std::vector<std::vector<int>>{{0, 2}, {1, 3}, {4}});
  CHECK(order.host_of(3) == 1);
  CHECK(order.index_of(2) == 1);
  CHECK(order.partial(Element::bf16) == Element::f32);
  CHECK(order.partial(Element::f32) == Element::f32);
  CHECK(Order({0, 0, 0}).partial(Element::bf16) == Element::bf16);  // one host: there are no partial sums to send
}

TEST_CASE("float32 sums fold within a host, then over hosts") {
  for (const int64_t n : {1, 7, 2048, 5000}) {
    const std::vector<int> hosts{0, 1, 0, 1, 1};
    const Order order(hosts);
    const auto parts = random_parts(5, n);
    Floats expected = summed(parts, {0, 2});
    const Floats second = summed(parts, {1, 3, 4});
    for (int64_t i = 0; i < n; i++) expected[i] += second[i];

    std::vector<const void*> pointers;
    for (const auto& part : parts) pointers.push_back(part.data());
    Floats out(n);
    void* outs[] = {out.data()};
    order.fold_ranks(Element::f32, ReduceOp::sum, outs, 1, pointers.data(), n);
    CHECK(out == expected);
  }
}

TEST_CASE("16 bits are rounded once, at the end") {
  const Order order({0, 0, 1});
  const uint16_t one = bf16_of_float(1.0f), small = bf16_of_float(0.00390625f);  // 2^-8: half a rounding step at 1
  const uint16_t* parts[] = {&one, &small, &small};
  uint16_t out = 0;
  void* outs[] = {&out};
  order.fold_ranks(Element::bf16, ReduceOp::sum, outs, 1, reinterpret_cast<const void* const*>(parts), 1);
  CHECK(float_of_bf16(out) == 1.0078125f);  // 1 + 2^-7; rounded after each step it would stay 1
}

TEST_CASE("bytes cannot be reduced") {
  const Order order({0, 0});
  uint8_t a = 1, b = 2, out = 0;
  const void* parts[] = {&a, &b};
  void* outs[] = {&out};
  CHECK_THROWS_AS(order.fold_ranks(Element::byte, ReduceOp::sum, outs, 1, parts, 1), Error);
}
