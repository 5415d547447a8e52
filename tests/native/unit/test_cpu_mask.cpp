// Sets of CPUs: CPUs beyond glibc's limit of 1,024 are kept, and a thread's own set can be read and restored.
#include <doctest/doctest.h>

#include "core/cpu_mask.h"
#include "runtime/pool.h"

using namespace ckdist;

TEST_CASE("a mask has CPUs beyond 1024") {
  CpuMask mask;
  mask.add(5000);
  CHECK(mask.has(5000));
  CHECK(!mask.has(5000 % 1024));
  CHECK(!mask.has(5001));
  mask.add(-1);
  mask.add(CpuMask::kMaxCpus);
  CHECK(!mask.has(-1));
  CHECK(!mask.apply());  // there is no such CPU: the thread's set does not change
}

TEST_CASE("a pool gives the calling thread its CPUs back, also if one that it pins to is not there") {
  CpuMask before, after;
  REQUIRE(before.read());
  for (const int cpu : {0, 5000}) {
    Pool pool(1, {cpu}, {}, 10);
    pool.run(1, [](int) {});
  }
  REQUIRE(after.read());
  for (int cpu = 0; cpu < 4096; cpu++) CHECK(before.has(cpu) == after.has(cpu));
}
