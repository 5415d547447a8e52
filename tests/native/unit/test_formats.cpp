// The table of activation formats agrees with the kernels of every level of this build, including levels that the CPU
// lacks.
#include <doctest/doctest.h>

#include "kernels/formats.h"
#include "kernels/kernels.h"

using namespace ckdist;

TEST_CASE("the table of formats agrees with the kernels of every level") {
  for (const Level& level : levels()) {
    CAPTURE(level.kernels->name);
    const LevelFormats* formats = level_formats(level.kernels->name);
    REQUIRE(formats);
    for (int type = 0; type < kTypeCount; ++type) {
      CAPTURE(type);
      const LinearKernel& kernel = level.kernels->linear[type];
      if (kernel.multiply) CHECK(kernel.activation == activation_format(*formats, static_cast<Type>(type)));
    }
  }
}
