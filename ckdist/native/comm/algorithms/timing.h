// Measures collectives under the conditions of real use: on data that was just written, in a loop without other work.
//
// An in-place collective that is repeated on the same data would find each slice in its owner's cache and look too
// fast. So the data is rewritten before every call. The time of rewriting is measured separately and subtracted.
#pragma once
#include <cstdint>
#include <functional>

namespace ckdist {

// Seconds of one `call`: the mean of `calls` calls after a few warm-up calls.
double time_on_fresh_data(void* data, int64_t bytes, int calls, const std::function<void()>& call);

}  // namespace ckdist
