#pragma once
#include <memory>

#include "runtime/pool.h"

struct ckdist_pool {
  std::shared_ptr<ckdist::Pool> pool;
};
