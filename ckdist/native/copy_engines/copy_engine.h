// Copies packed weights into their place: a CopyEngine begins them and, where the machine has a device for it, leaves
// them to it.
//
// Two kinds: streaming stores of the calling thread (stream_engine.h) and a work queue of an Intel Data Streaming
// Accelerator (dsa_engine.h). An engine belongs to one thread; a machine's threads have one each.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace ckdist {

struct Copy {
  uint8_t* to;
  const uint8_t* from;  // must not overlap `to`
  int64_t bytes;
};

class CopyEngine {
 public:
  CopyEngine() = default;
  // Waits, for a limited time, until no copy is under way.
  virtual ~CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // What copies, for a log: "streaming stores of 64 bytes", "DSA wq0.1".
  virtual const char* name() const = 0;

  // Begins copies. `from` must stay as it is, and `to` be left alone, until done() said so of the ticket; the array may
  // go at once. Ticket 0: done already. What a device does not take now, the calling thread copies.
  virtual int64_t submit(const Copy* copies, int count) = 0;

  // Never waits. True: every byte of the ticket's copies is in place, and other threads see it that acquire what this
  // one releases afterwards. What a device left undone is copied here. A ticket may be asked about again after it was
  // done. Throws Error(native) where a device neither ends a copy nor lets go of the memory: then nothing here may be
  // used or freed any more.
  virtual bool done(int64_t ticket) = 0;

  // One line on why a device is no longer used, from then on; else null. Copies go on by streaming stores.
  virtual const char* trouble() const { return nullptr; }
};

enum class CopyEngineChoice : int { automatic = 0, dsa = 1, threads = 2 };

// The engine for the calling thread; a DSA queue is sought on the node of this process's memory first (core/numa.h).
// `reason` becomes why there is no DSA queue in use, or empty. Throws Error(config) with it where `dsa` was chosen.
std::unique_ptr<CopyEngine> open_copy_engine(CopyEngineChoice choice, std::string* reason);

}  // namespace ckdist
