#include "runtime/repacker.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <new>

#include "core/stream_copy.h"

namespace ckdist {
namespace {

constexpr int64_t kAheadBytes = 128 << 20;  // of read-ahead from the disk
constexpr int64_t kGivenBytes = 4 << 20;    // of a file whose pages are released at a time
constexpr int64_t kQuietNs = 20'000'000;    // if no step ran for so long, no request waits for a token
constexpr int64_t kPollNs = 2'000'000;
constexpr int64_t kRest = 3;  // while steps run: a thread rests for kRest times the time of a slice

void sleep_ns(int64_t ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

}  // namespace

Repacker::Repacker(Way way, std::vector<const SlicedMatrix*> own, std::vector<const SlicedMatrix*> others,
                   std::vector<const MappedFile*> files)
    : way_(way), own_(std::move(own)), others_(std::move(others)), files_(std::move(files)), begin_ns_(now_ns()) {
  for (size_t i = 0; i < own_.size(); ++i) {
    first_[own_[i]] = slices_.size();
    for (int64_t slice = 0; slice < own_[i]->count(); ++slice) {
      slices_.push_back({int32_t(i), int32_t(slice)});
      bytes_ += own_[i]->bytes(slice);
    }
  }
  working_ = way_.threads;
  for (int i = 0; i < way_.threads; ++i) {
    try {
      threads_.emplace_back(&Repacker::work, this, i);
    } catch (const std::exception& e) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        working_ -= way_.threads - i;
      }
      stop();
      fail(Status::native, "loading thread %d of %d could not start: %s", i + 1, way_.threads, e.what());
    }
  }
}

Repacker::~Repacker() { stop(); }

void Repacker::stop() {
  stop_ = true;
  // With SCHED_IDLE, a thread could wait for seconds on a busy machine before it sees this.
  const sched_param none = {};
  for (std::thread& thread : threads_)
    if (thread.joinable()) pthread_setschedparam(thread.native_handle(), SCHED_OTHER, &none);
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

bool Repacker::wait(int milliseconds) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), [this] { return working_ == 0; }))
      return false;
  }
  check();
  return true;
}

void Repacker::check() {
  if (failed_.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(mutex_);
    throw *error_;
  }
  if (!finished())
    for (const MappedFile* file : files_) file->check();
}

int64_t Repacker::ready_bytes() const {
  int64_t bytes = 0;
  for (const SlicedMatrix* matrix : own_) {
    const Matrix& shape = matrix->stored().shape();
    if (matrix->count())
      bytes += shape.tile_bytes * shape.tile_count() / matrix->count() * (matrix->count() - matrix->left());
    if (matrix->count() && matrix->whole()) bytes += shape.tile_bytes * shape.tile_count() % matrix->count();
  }
  return bytes;
}

double Repacker::seconds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return double((end_ns_ ? end_ns_ : now_ns()) - begin_ns_) * 1e-9;
}

bool Repacker::steps_run() const {
  return stepping_.load(std::memory_order_acquire) ||
         now_ns() - last_step_ns_.load(std::memory_order_relaxed) < kQuietNs;
}

bool Repacker::claim_within_limit(const SlicedMatrix& matrix, int64_t slice) {
  if (way_.until >= 1) return matrix.claim(slice);
  const int64_t bytes = matrix.bytes(slice);
  if (double(claimed_.fetch_add(bytes) + bytes) <= way_.until * double(bytes_) && matrix.claim(slice)) return true;
  claimed_ -= bytes;
  return false;
}

bool Repacker::claim(const SlicedMatrix& matrix, int64_t slice) {
  const int64_t bytes = matrix.bytes(slice);
  if (const auto own = first_.find(&matrix); own != first_.end()) read_ahead(own->second + slice);
  if (way_.until < 1 && &matrix.arena() != &own_[0]->arena())
    return false;  // other ranks limit their arenas themselves
  if (allowance_.load(std::memory_order_relaxed) < bytes || !claim_within_limit(matrix, slice)) return false;
  allowance_.fetch_sub(bytes, std::memory_order_relaxed);
  return true;
}

void Repacker::keep(const SlicedMatrix& matrix, int64_t slice, const uint8_t* from) {
  store(matrix, slice, from);
  kept_.fetch_add(matrix.bytes(slice), std::memory_order_relaxed);
}

void Repacker::store(const SlicedMatrix& matrix, int64_t slice, const uint8_t* from) {
  const int64_t bytes = matrix.bytes(slice);
  matrix.arena().will_write(matrix.place(slice), bytes);
  widest_stream_copy()(matrix.place(slice), from, bytes);
  stream_fence();
  publish(matrix, slice);
}

void Repacker::publish(const SlicedMatrix& matrix, int64_t slice) {
  WeightArena::Kept* const kept = matrix.arena().kept();
  for (const MappedFile* file : files_)
    if (kept && file->has_failed()) __atomic_store_n(&kept->damaged, 1u, __ATOMIC_RELEASE);
  matrix.publish(slice);
  matrix.arena().written(matrix.bytes(slice));
  stored_done_.fetch_add(matrix.stored().stored_bytes() * (matrix.begin(slice + 1) - matrix.begin(slice)) /
                             matrix.stored().shape().tile_count(),
                         std::memory_order_relaxed);
}

void Repacker::fail_with(const Error& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) error_ = std::make_unique<Error>(error);
  failed_ = stop_ = true;
}

void Repacker::work(int number) noexcept {
  try {
    if (way_.background) {
      const sched_param none = {};
      // A computing thread preempts this one at once. If the call fails, the thread has normal priority and rests
      // between slices.
      sched_setscheduler(0, SCHED_IDLE, &none);
    }
    fill(number);
  } catch (const Error& e) { fail_with(e); } catch (const std::exception& e) {
    fail_with(Error(Status::capacity, std::string("a loading thread failed: ") + e.what()));
  }
  bool last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last = working_ == 1;
    if (!last) --working_;
  }
  if (!last) return;
  finish();
  std::lock_guard<std::mutex> lock(mutex_);
  working_ = 0;
  changed_.notify_all();
}

void Repacker::fill(int number) {
  if (own_.empty()) return;
  int64_t largest = 0;
  for (const SlicedMatrix* matrix : own_) largest = std::max(largest, matrix->largest_bytes());
  if (!way_.background) own_[0]->arena().will_write_part(number, way_.threads);
  TraceLane* const lane = way_.trace ? way_.trace->lane("repacker " + std::to_string(number)) : nullptr;
  const std::unique_ptr<uint8_t, decltype(&std::free)> packed(
      static_cast<uint8_t*>(std::aligned_alloc(4096, static_cast<size_t>((largest + 4095) / 4096 * 4096))), std::free);
  if (!packed) throw std::bad_alloc();
  StoredMatrix::Rows rows;
  for (size_t i; !stop_ && (i = next_.fetch_add(1)) < slices_.size();) {
    const SlicedMatrix& matrix = *own_[slices_[i].matrix];
    const int64_t slice = slices_[i].slice, begin_ns = now_ns();
    read_ahead(i);
    if (!claim_within_limit(matrix, slice)) continue;
    matrix.stored().pack(matrix.begin(slice), matrix.begin(slice + 1), packed.get(), &rows);
    store(matrix, slice, packed.get());
    const int64_t end_ns = now_ns();
    if (lane) lane->add(ckdist_trace_copy, begin_ns, end_ns, int32_t(matrix.bytes(slice) >> 10));
    make_room(number, end_ns - begin_ns);
  }
}

void Repacker::read_ahead(size_t from) {
  const size_t until = std::min(slices_.size(), from + size_t(kAheadBytes / SlicedMatrix::kSliceBytes));
  for (size_t i; (i = read_.load(std::memory_order_relaxed)) < until;) {
    if (!read_.compare_exchange_weak(i, i + 1, std::memory_order_relaxed)) continue;
    const SlicedMatrix& matrix = *own_[slices_[i].matrix];
    if (!matrix.ready(slices_[i].slice))
      matrix.stored().will_need(matrix.begin(slices_[i].slice), matrix.begin(slices_[i].slice + 1));
  }
}

// While a request waits for tokens, one thread works for part of the time, and the others stop.
void Repacker::make_room(int number, int64_t worked_ns) {
  if (!way_.background) return;
  while (held_ && !stop_) sleep_ns(kPollNs);
  if (!steps_run()) return;
  if (number == 0) return sleep_ns(worked_ns * kRest);
  while (!stop_ && steps_run()) sleep_ns(kPollNs);
}

// Waits for other ranks and for steps of this rank, which may still be packing slices that they claimed.
void Repacker::finish() {
  const auto whole = [](const SlicedMatrix* matrix) { return matrix->whole(); };
  while (!stop_ && way_.until >= 1 &&
         !(std::all_of(own_.begin(), own_.end(), whole) && std::all_of(others_.begin(), others_.end(), whole)))
    sleep_ns(kPollNs);
  if (stop_ || way_.until < 1) return;
  try {
    for (const MappedFile* file : files_) file->check();
  } catch (const Error& e) { return fail_with(e); }
  for (const MappedFile* file : files_)
    for (int64_t at = 0; at < file->size() && !stop_; at += kGivenBytes) {
      const int64_t begin_ns = now_ns();
      file->give_back(at, std::min(kGivenBytes, file->size() - at), way_.background);
      make_room(0, now_ns() - begin_ns);
    }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end_ns_ = now_ns();
  }
  finished_.store(true, std::memory_order_release);
}

}  // namespace ckdist
