// Copies by streaming stores: they go to memory past the caches, so that what computes keeps its own there, and no line
// is read to be overwritten.
#pragma once
#include "copy_engines/copy_engine.h"

namespace ckdist {

using StreamCopy = void (*)(uint8_t* to, const uint8_t* from, int64_t bytes);

// Copies of vectors of 16, 32 or 64 bytes; null where this CPU has none. They are visible in no order until
// stream_fence().
StreamCopy stream_copy_of(int vector_bytes);
// The widest of this CPU, or of the ISA that CKDIST_ISA names; plain copies on machines without streaming stores.
struct WidestStream {
  StreamCopy copy;
  int vector_bytes;  // 0: plain
};
const WidestStream& widest_stream();
void stream_fence();

class StreamEngine final : public CopyEngine {
 public:
  StreamEngine();
  const char* name() const override { return name_; }
  int64_t submit(const Copy* copies, int count) override;
  bool done(int64_t) override { return true; }

 private:
  const WidestStream stream_;
  char name_[40];
};

}  // namespace ckdist
