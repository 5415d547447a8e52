#pragma once
#include <cstdint>

namespace ckdist {

struct Range {
  int64_t begin, end;
};

}  // namespace ckdist
