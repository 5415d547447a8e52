// Copies with a work queue of an Intel Data Streaming Accelerator, through a DsaPortal.
//
// Copies that the device refuses, does not complete in time, or ends with an error are made here. After a few of those
// the device is given up. A page fault is not an error: the pages are touched, and the device continues after the bytes
// it has copied.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "copy_engines/copy_engine.h"
#include "copy_engines/dsa_format.h"
#include "copy_engines/stream_engine.h"

namespace ckdist {

// The destination of descriptors: a queue of the kernel (dsa_queue.h), or a device in software.
class DsaPortal {
 public:
  virtual ~DsaPortal() = default;
  // Submits 64 bytes, aligned to 64, once. All earlier stores are visible to the device. Returns false if the queue is
  // full.
  virtual bool submit(const void* descriptor) = 0;
  // Closes the queue. Returns true when the device no longer uses any memory of submitted descriptors, false if that
  // takes longer than `ns`.
  virtual bool close(int64_t ns) = 0;
};

struct DsaQueueLimits {
  std::string name;          // for example wq0.1
  int64_t max_transfer = 0;  // bytes of one descriptor
  int64_t max_batch = 1;     // descriptors of one batch; below 2: no batches
  // Descriptors that fit into a dedicated queue, which does not report that it is full. 0: a shared queue.
  int64_t credits = 0;
  bool block_on_fault = false;  // the device may wait for pages
};

class DsaEngine final : public CopyEngine {
 public:
  static constexpr int kJobs = 32;          // tickets in flight
  static constexpr int kPieces = 16;        // descriptors of one ticket
  static constexpr int kMostErrors = 3;     // errors of the device until it is given up
  static constexpr int kMostRefusals = 64;  // refusals in a row until it is given up
  static constexpr int kMostFaults = 8;     // page faults of one piece that are resolved by touching pages
  static constexpr int64_t kCopyNs = 2'000'000'000, kCloseNs = 5'000'000'000;

  DsaEngine(std::unique_ptr<DsaPortal> portal, const DsaQueueLimits& limits, int64_t copy_ns = kCopyNs,
            int64_t close_ns = kCloseNs);
  ~DsaEngine() override;

  const char* name() const override { return name_.c_str(); }
  int64_t submit(const Copy* copies, int count) override;
  bool done(int64_t ticket) override;
  const char* trouble() const override { return trouble_.empty() ? nullptr : trouble_.c_str(); }

  // Copies one page and compares it. Waits up to the time limit of a copy.
  bool works();

 private:
  struct Piece {  // the rest of a copy, or of a part of it
    uint8_t* to;
    const uint8_t* from;
    uint32_t bytes;
    int faults;
    bool waiting;
  };
  struct Job {
    int64_t ticket = 0;
    int64_t deadline = 0;
    int pieces = 0, waiting = 0;
    bool batched = false;  // submitted as one batch, which is not complete yet
    Piece piece[kPieces];
  };
  struct DeviceMemory {  // memory of the device besides the copies
    DsaDescriptor descriptors[kJobs][kPieces], batches[kJobs];
    DsaRecord records[kJobs][kPieces], batch_records[kJobs];
  };

  int64_t split(const Copy* copies, int count, Job& job);
  void begin(Job& job);
  bool begin_piece(Job& job, int index);
  void describe(Job& job, int index);
  bool hand_over(const DsaDescriptor& descriptor);
  void poll(Job& job);
  void settle(Job& job, int index, uint8_t status);
  bool resume(Job& job, int index);
  void finish_here(Job& job, int index);
  void copy_here(uint8_t* to, const uint8_t* from, int64_t bytes);
  void note_error(uint8_t status);
  void give_up(const std::string& why);
  void abandon(const std::string& why);
  int index_of(const Job& job) const { return static_cast<int>(&job - jobs_); }

  std::unique_ptr<DsaPortal> portal_;
  const DsaQueueLimits limits_;
  const int64_t copy_ns_, close_ns_;
  const std::string name_;
  const StreamCopy stream_;
  std::unique_ptr<DeviceMemory> memory_;
  Job jobs_[kJobs];
  int64_t tickets_ = 0;
  int64_t in_queue_ = 0;  // submitted descriptors that are not known to be complete
  int errors_ = 0, refusals_ = 0;
  bool given_up_ = false, closed_ = false, stuck_ = false;
  std::string trouble_;
};

}  // namespace ckdist
