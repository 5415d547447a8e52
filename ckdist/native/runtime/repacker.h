// Packs stored weights slice by slice, before steps run or in the background.
//
// Its own threads pack slices. Computing threads do too: a step packs a slice that it needs and keeps it, within the
// step's allowance. If steps use all cores, the computing threads do the packing, so no spare core is needed.
#pragma once
#include <condition_variable>
#include <thread>
#include <unordered_map>

#include "core/error.h"
#include "core/futex.h"
#include "core/trace.h"
#include "runtime/sliced_matrix.h"

namespace ckdist {

class Repacker {
 public:
  struct Way {
    int threads;  // while no step runs
    // While steps run: one thread of low priority works for part of the time.
    bool background;
    double until;  // part of the packed bytes at which it stops for good, if less than 1
    Trace* trace;  // receives a lane for each thread and must outlive this object; or null
  };

  // `own`: matrices to pack, in this order. `others`: matrices that other ranks pack. Files are released when all are
  // packed.
  Repacker(Way way, std::vector<const SlicedMatrix*> own, std::vector<const SlicedMatrix*> others,
           std::vector<const MappedFile*> files);
  ~Repacker();
  Repacker(const Repacker&) = delete;
  Repacker& operator=(const Repacker&) = delete;

  // Returns true if its threads have ended, false after the timeout. Throws as check() does.
  bool wait(int milliseconds);
  // Throws the failure of a thread, or an error if a file has changed since it was opened. Call this before publishing
  // a step that began while packing ran.
  void check();
  void stop();
  // hold(true) pauses the background threads after their current slice, for measurements; hold(false) resumes them.
  // Steps still keep the slices that they pack.
  void hold(bool held) { held_.store(held, std::memory_order_relaxed); }

  // True if all weights that this rank reads are packed, on all ranks, and the files are released.
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  int64_t bytes() const { return bytes_; }  // packed size of all matrices
  int64_t ready_bytes() const;
  int64_t stored_bytes_done() const { return stored_done_.load(std::memory_order_relaxed); }
  // Bytes of slices that this rank's steps have kept.
  int64_t kept_bytes() const { return kept_.load(std::memory_order_relaxed); }
  double seconds() const;

  // Sets the bytes of slices that the next step may keep.
  void allow(int64_t bytes) { allowance_.store(bytes, std::memory_order_relaxed); }
  // Lives during a step of any model of this process: packing in the background makes room for it.
  struct Step {
    Step() { stepping_.store(true, std::memory_order_relaxed); }
    ~Step() {
      last_step_ns_.store(now_ns(), std::memory_order_relaxed);
      stepping_.store(false, std::memory_order_release);
    }
  };
  // For a computing thread that needs a slice: reads ahead from the disk. If true, the caller packs and keeps the
  // slice.
  bool claim(const SlicedMatrix& matrix, int64_t slice);
  // Stores a claimed slice, which is packed at `from`.
  void keep(const SlicedMatrix& matrix, int64_t slice, const uint8_t* from);

 private:
  struct Slice {
    int32_t matrix, slice;
  };

  void work(int number) noexcept;
  void fail_with(const Error& error);  // ends all threads
  void fill(int number);
  void store(const SlicedMatrix& matrix, int64_t slice, const uint8_t* from);
  void publish(const SlicedMatrix& matrix, int64_t slice);
  bool claim_within_limit(const SlicedMatrix& matrix, int64_t slice);
  void read_ahead(size_t from);
  bool steps_run() const;
  void make_room(int number, int64_t worked_ns);
  void finish();

  const Way way_;
  const std::vector<const SlicedMatrix*> own_, others_;
  const std::vector<const MappedFile*> files_;
  std::vector<Slice> slices_;                              // slices of own_, in order
  std::unordered_map<const SlicedMatrix*, size_t> first_;  // index of a matrix's first slice
  int64_t bytes_ = 0;
  const int64_t begin_ns_;

  std::atomic<size_t> next_{0}, read_{0};  // next slice to pack, next slice to read ahead
  std::atomic<int64_t> allowance_{0}, kept_{0}, stored_done_{0};
  std::atomic<int64_t> claimed_{0};  // bytes, counted only if there is a limit
  static inline std::atomic<int64_t> last_step_ns_{0};
  static inline std::atomic<bool> stepping_{false};
  std::atomic<bool> stop_{false}, finished_{false}, held_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int working_ = 0;               // threads that are still working; guarded by mutex_
  int64_t end_ns_ = 0;            // guarded by mutex_
  std::unique_ptr<Error> error_;  // the first failure; guarded by mutex_
  std::atomic<bool> failed_{false};
  std::vector<std::thread> threads_;
};

}  // namespace ckdist
