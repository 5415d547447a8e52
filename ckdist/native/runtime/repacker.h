// Turns stored weights into packed ones, slice by slice: before anything runs, or in the background while steps do.
//
// Slices are filled by threads of its own, and by threads that compute: these had to pack a slice to multiply with it,
// and keep it, as far as a step's allowance goes. Where steps leave no core free the latter is what fills, so nothing
// depends on a spare core.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "copy_engines/copy_engine.h"
#include "core/error.h"
#include "core/trace.h"
#include "runtime/sliced_matrix.h"

namespace ckdist {

class Repacker {
 public:
  struct Way {
    int threads;      // at work while nothing else is
    bool background;  // while steps run: one thread, which makes room for everybody, for a share of the time
    CopyEngineChoice engine;
    double until;  // of the packed bytes: where it stops for good, below 1
    Trace* trace;  // that gets a lane for each thread, and outlives this; or null
  };

  // `own`: what is to be packed, the first first. `others`: of other ranks, who pack it; files are needed until that is
  // done too.
  Repacker(Way way, std::vector<const SlicedMatrix*> own, std::vector<const SlicedMatrix*> others,
           std::vector<const MappedFile*> files);
  ~Repacker();
  Repacker(const Repacker&) = delete;
  Repacker& operator=(const Repacker&) = delete;

  // True when its threads have ended, false when the time passed before; throws as check() does.
  bool wait(int milliseconds);
  // Throws what a thread failed with, or what happened to a file since it was opened. Of a step that began before
  // everything was packed nobody may see anything until this was called.
  void check();
  void stop();
  // From the next slice on its own background threads wait until they are let go again: for what is to be measured.
  // Steps keep what they pack.
  void hold(bool held) { held_.store(held, std::memory_order_relaxed); }

  // Everything is packed, on all ranks whose weights this rank reads, and the files are given back.
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  int64_t bytes() const { return bytes_; }  // packed, in all
  int64_t ready_bytes() const;
  int64_t stored_bytes_done() const { return stored_done_.load(std::memory_order_relaxed); }
  int64_t kept_bytes() const {
    return kept_.load(std::memory_order_relaxed);
  }  // of slices that this rank's steps have kept
  double seconds() const;
  const std::string& engine() const { return engine_; }  // by which its own threads write
  std::string trouble() const;                           // why a device was given up meanwhile, or empty

  // Steps tell when they begin, with the bytes of slices that they may keep, and when they end.
  void begin_step(int64_t allowance);
  void end_step();
  // For a thread that computes and needs a slice: what follows is asked for of the disk; if true, the slice is its to
  // pack and keep.
  bool claim(const SlicedMatrix& matrix, int64_t slice);
  // Keeps a claimed slice, which is packed at `from`; `engine` is the thread's.
  void keep(const SlicedMatrix& matrix, int64_t slice, const uint8_t* from, CopyEngine& engine);

 private:
  struct Slice {
    int32_t matrix, slice;
  };
  struct Staged;

  void work(int number) noexcept;
  void fill(int number);
  void publish(const SlicedMatrix& matrix, int64_t slice);
  bool claim_within_limit(const SlicedMatrix& matrix, int64_t slice);
  void read_ahead(size_t from);
  bool steps_run() const;
  void make_room(int number, int64_t worked_ns);
  void finish();

  const Way way_;
  const std::vector<const SlicedMatrix*> own_, others_;
  const std::vector<const MappedFile*> files_;
  std::vector<Slice> slices_;                              // of own_, in order
  std::unordered_map<const SlicedMatrix*, size_t> first_;  // the place of a matrix's first among them
  int64_t bytes_ = 0;
  std::string engine_;
  const int64_t begin_ns_;

  std::atomic<size_t> next_{0}, read_{0};  // slice that is taken, that is asked for of the disk
  std::atomic<int64_t> allowance_{0}, kept_{0}, stored_done_{0};
  std::atomic<int64_t> claimed_{0};  // bytes, counted where there is a limit
  std::atomic<int64_t> last_step_ns_{0};
  std::atomic<bool> stepping_{false}, stop_{false}, finished_{false}, held_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int working_ = 0;               // threads still at work; under mutex_
  int64_t end_ns_ = 0;            // under mutex_
  std::string trouble_;           // under mutex_
  std::unique_ptr<Error> error_;  // the first failure; under mutex_
  std::atomic<bool> failed_{false};
  std::vector<std::thread> threads_;
};

}  // namespace ckdist
