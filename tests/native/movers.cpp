// What a test needs of the movers, compiled beside them, from Python.
#include "movers/mover.h"
#include "movers/stream_mover.h"

using namespace ckdist;

extern "C" {

// 0: this CPU has no such vectors.
int stream_copy(int vector_bytes, uint8_t* to, const uint8_t* from, int64_t bytes) {
  const StreamCopy copy = stream_copy_of(vector_bytes);
  if (!copy) return 0;
  copy(to, from, bytes);
  stream_fence();
  return 1;
}
int widest_stream_bytes(void) { return widest_stream().vector_bytes; }

}
