// Measures exchanges and collectives under the conditions of real use.
#pragma once
#include <cstdint>
#include <functional>

#include "comm/transports/transport.h"

namespace ckdist {

// Seconds of one `call`: the mean of `calls` calls after a few warm-up calls. An in-place collective that is repeated
// on the same data would find each slice in its owner's cache and look too fast. So the data is rewritten before every
// call. The time of rewriting is measured separately and subtracted.
double time_on_fresh_data(void* data, int64_t bytes, int calls, const std::function<void()>& call);

// Seconds of one exchange of `bytes` with `peer`: the least of `calls` after one warm-up. Both ranks must call it. Both
// send and both receive at the same time, as in collectives.
double time_exchange(Transport& transport, int peer, int64_t bytes, int calls);

}  // namespace ckdist
