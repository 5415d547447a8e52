// C functions for tests of streaming copies, called from Python.
#include "core/stream_copy.h"

using namespace ckdist;

extern "C" {

// Returns 0 if this CPU has no such vectors.
int stream_copy(int vector_bytes, uint8_t* to, const uint8_t* from, int64_t bytes) {
  const StreamCopy copy = stream_copy_of(vector_bytes);
  if (!copy) return 0;
  copy(to, from, bytes);
  stream_fence();
  return 1;
}

// Returns 0 if the copies of this machine are plain.
int widest_stream_bytes(void) {
  for (int bytes = 64; bytes >= 16; bytes /= 2)
    if (widest_stream_copy() == stream_copy_of(bytes)) return bytes;
  return 0;
}
}
