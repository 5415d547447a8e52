// float16 and bfloat16 as bit patterns: round trips of every value of 16 bits, and rounding to nearest even.
#include <cmath>

#include <doctest/doctest.h>

#include "kernels/half.h"

using namespace ckdist;

TEST_CASE("every half survives the way to float and back") {
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    const float value = float_of_half(uint16_t(bits));
    if (std::isnan(value)) {
      CHECK((bits & 0x7c00u) == 0x7c00u);
      CHECK(std::isnan(float_of_half(half_of_float(value))));
    } else {
      CHECK(half_of_float(value) == bits);
    }
  }
}

TEST_CASE("every bfloat16 survives the way to float and back") {
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    const float value = float_of_bf16(uint16_t(bits));
    if (std::isnan(value)) CHECK(std::isnan(float_of_bf16(bf16_of_float(value))));
    else CHECK(bf16_of_float(value) == bits);
  }
}

TEST_CASE("halfway goes to the even neighbour") {
  for (uint32_t bits = 0; bits < 0x7bff; bits++) {
    const float low = float_of_half(uint16_t(bits)), high = float_of_half(uint16_t(bits + 1));
    const float middle = low + (high - low) / 2;  // exact: a float has 13 bits more
    CHECK(half_of_float(middle) == bits + (bits & 1));
    CHECK(half_of_float(std::nextafterf(middle, 0.0f)) == bits);
    CHECK(half_of_float(std::nextafterf(middle, 1e9f)) == bits + 1);
  }
}

TEST_CASE("what is too large is infinite") {
  CHECK(half_of_float(65519.0f) == 0x7bff);
  CHECK(half_of_float(65520.0f) == 0x7c00);
  CHECK(half_of_float(-1e30f) == 0xfc00);
  CHECK(bf16_of_float(3.4e38f) == 0x7f80);
}
