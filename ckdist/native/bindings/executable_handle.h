// The definition of the opaque ckdist_executable.
#pragma once
#include "runtime/inference.h"

struct ckdist_executable : ckdist::Inference {
  using Inference::Inference;
};
