// The definition of the opaque trace handle.
#pragma once
#include "core/trace.h"

struct ckdist_trace : ckdist::Trace {
  using Trace::Trace;
};
