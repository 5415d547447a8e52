// What a trace is behind its C handle.
#pragma once
#include "core/trace.h"

struct ckdist_trace : ckdist::Trace {
  using Trace::Trace;
};
