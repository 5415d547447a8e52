// Copies packed weights to their destination. A CopyEngine starts copies and, if the machine has a suitable device,
// leaves them to it.
//
// There are two kinds: streaming stores of the calling thread (stream_engine.h), and a work queue of an Intel Data
// Streaming Accelerator (dsa_engine.h). An engine belongs to one thread.
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
  // Waits, for a limited time, until no copy is in flight.
  virtual ~CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // The method of copying, for logs: "streaming stores of 64 bytes", "DSA wq0.1".
  virtual const char* name() const = 0;

  // Starts copies and returns a ticket; 0 if they are already complete. Until done() is true for the ticket, `from`
  // must not change and `to` must not be used. The array may be freed at once. The calling thread makes the copies that
  // a device does not accept.
  virtual int64_t submit(const Copy* copies, int count) = 0;

  // Never waits. Returns true if every byte of the ticket's copies is in place. Other threads that synchronize with
  // this thread see them. Copies that a device did not complete are made here. A ticket may be tested again after it
  // was done. Throws Error(native) if a device neither completes a copy nor releases the memory: then no memory of the
  // copies may be used or freed.
  virtual bool done(int64_t ticket) = 0;

  // If a device is no longer used: one line with the reason; else null. Later copies use streaming stores.
  virtual const char* trouble() const { return nullptr; }
};

enum class CopyEngineChoice : int { automatic = 0, dsa = 1, threads = 2 };

// Opens the engine for the calling thread. Searches for a DSA queue first on the NUMA node of this process's memory
// (core/numa.h). `reason`: why no DSA queue is used, or empty. Throws Error(config) with that reason if the choice is
// `dsa`.
std::unique_ptr<CopyEngine> open_copy_engine(CopyEngineChoice choice, std::string* reason);

}  // namespace ckdist
