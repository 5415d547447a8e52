// Measuring collectives as they are used: on data that was written just before, from a loop that calls nothing else.
//
// An in-place collective repeated on the same data would find each slice in its owner's cache and look too fast; so
// every call is preceded by a rewriting of the data, whose own time is measured apart and taken off.
#pragma once
#include <cstdint>
#include <functional>

namespace ckdist {

// Seconds of one `call`, of `calls` after a few that do not count.
double time_on_fresh_data(void* data, int64_t bytes, int calls, const std::function<void()>& call);

}  // namespace ckdist
