// Copies with streaming stores. They bypass the caches, so that computing threads keep their data there, and no line is
// read before it is overwritten.
#pragma once
#include <cstdint>

namespace ckdist {

// `from` must not overlap `to`. Stores are unordered until stream_fence().
using StreamCopy = void (*)(uint8_t* to, const uint8_t* from, int64_t bytes);

// A copy with vectors of 16, 32 or 64 bytes; null if this CPU has none.
StreamCopy stream_copy_of(int vector_bytes);
// The copy with the widest vectors of this CPU, or of the ISA in CKDIST_ISA. Plain copies on machines without streaming
// stores.
StreamCopy widest_stream_copy();
void stream_fence();

}  // namespace ckdist
