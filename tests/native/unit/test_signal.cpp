// Signals wake sleeping threads at any moment, and a wait without a signal ends with an error.
#include <stdexcept>
#include <thread>

#include <doctest/doctest.h>

#include "core/futex.h"

using namespace ckdist;

TEST_CASE("no wake-up is lost between two threads that answer each other") {
  Signal there, back;
  const auto give_up = [] { throw std::runtime_error("nothing came for a second"); };
  std::thread other([&] {
    for (uint32_t i = 1; i <= 2000; i++) {
      there.wait(i % 3 ? 0 : 50, 1000000000, [&](uint32_t v) { return v == i; }, give_up);
      back.set(i);
    }
  });
  for (uint32_t i = 1; i <= 2000; i++) {
    there.add(1);
    back.wait(i % 2 ? 0 : 50, 1000000000, [&](uint32_t v) { return v == i; }, give_up);
  }
  other.join();
  CHECK(there.value.load() == 2000);
  CHECK(there.sleepers.load() == 0);
}

TEST_CASE("a wait asks after every sleep whether to go on") {
  Signal never;
  int ticks = 0;
  const auto tick = [&] {
    if (++ticks == 3) throw std::runtime_error("given up");
  };
  CHECK_THROWS_WITH(never.wait(10, 1000000, [](uint32_t v) { return v != 0; }, tick), "given up");
  CHECK(never.sleepers.load() == 0);
}
