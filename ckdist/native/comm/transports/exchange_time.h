// Measures a transport between two ranks as collectives use it: both send and both receive at the same time.
#pragma once
#include "comm/transports/transport.h"

namespace ckdist {

// Seconds of one exchange of `bytes` with `peer`: the least of `calls` after one warm-up. Both ranks must
// call it.
double time_exchange(Transport& transport, int peer, int64_t bytes, int calls);

}  // namespace ckdist
