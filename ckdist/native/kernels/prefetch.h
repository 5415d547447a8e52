// What this CPU's own prefetching leaves to instructions.
#pragma once

namespace ckdist {

// Whether products of one or two tokens fetch their weights by instructions, and all products from near ahead.
extern const bool weights_fetched;

}  // namespace ckdist
