// Copies with streaming stores. They bypass the caches, so that computing threads keep their data there, and no line is
// read before it is overwritten.
#pragma once
#include "copy_engines/copy_engine.h"

namespace ckdist {

using StreamCopy = void (*)(uint8_t* to, const uint8_t* from, int64_t bytes);

// A copy with vectors of 16, 32 or 64 bytes; null if this CPU has none. Stores are unordered until stream_fence().
StreamCopy stream_copy_of(int vector_bytes);
// The widest vectors of this CPU, or of the ISA in CKDIST_ISA. Plain copies on machines without streaming stores.
struct WidestStream {
  StreamCopy copy;
  int vector_bytes;  // 0: plain copies
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
