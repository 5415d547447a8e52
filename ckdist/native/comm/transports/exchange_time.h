// How fast a transport is between two ranks, as collectives use it: both send and both receive at once.
#pragma once
#include "comm/transports/transport.h"

namespace ckdist {

// Seconds of one exchange of `bytes` with `peer`, the median of `calls` after one that does not count. Both ranks call
// it.
double time_exchange(Transport& transport, int peer, int64_t bytes, int calls);

}  // namespace ckdist
