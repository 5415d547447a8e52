#include "core/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <mutex>

#include "core/error.h"
#include "core/page.h"

namespace ckdist {
namespace {

const int64_t page_size = page_bytes();  // initialized before a signal handler needs it
constexpr int64_t kSampleBytes = 4096;
constexpr int64_t kSamples = 64;
std::mutex changing;  // protects the list and the handler's installation

}  // namespace

// One mapping in a list that the signal handler reads. The list only grows; free members are reused.
struct MappedFile::Guard {
  std::atomic<uintptr_t> begin{0}, end{0};  // end 0: free
  std::atomic<int64_t> damaged{-1};         // the first byte that could not be read
  Guard* next = nullptr;
  static std::atomic<Guard*> first;
  static struct sigaction before;  // the SIGBUS action before ours
};
std::atomic<MappedFile::Guard*> MappedFile::Guard::first{nullptr};
struct sigaction MappedFile::Guard::before;

// Only system calls and atomics are allowed here. Everything from the unreadable page on is replaced by zeros: one
// additional mapping, for any length of the file.
void MappedFile::on_bus_error(int, siginfo_t* info, void*) {
  const int error = errno;
  const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr), page = at / page_size * page_size;
  for (Guard* guard = Guard::first.load(std::memory_order_acquire); guard && info->si_code == BUS_ADRERR;
       guard = guard->next) {
    const uintptr_t begin = guard->begin.load(std::memory_order_relaxed),
                    end = guard->end.load(std::memory_order_acquire);
    if (at < begin || at >= end) continue;
    int64_t none = -1;
    guard->damaged.compare_exchange_strong(none, static_cast<int64_t>(page - begin));
    if (mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED) {
      errno = error;
      return;
    }
  }
  // Not our mapping: restores the earlier handler, and the instruction runs again. The second time restores the default
  // action, because the earlier handler may call this one.
  static std::atomic<bool> passed{false};
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGBUS, passed.exchange(true) ? &plain : &Guard::before, nullptr);
  errno = error;
}

void MappedFile::watch_bus_errors() {
  struct sigaction now = {}, ours = {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  if (sigaction(SIGBUS, nullptr, &now) != 0 || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error))
    return;
  Guard::before = now;
  sigaction(SIGBUS, &ours, nullptr);
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0 || fstat(descriptor_, &status_) != 0) {
    const int reason = errno;
    if (descriptor_ >= 0) close(descriptor_);
    fail(Status::model_file, "%s cannot be opened: %s", path.c_str(), std::strerror(reason));
  }
  if (size() == 0) return;
  try {
    checksum_ = checksum();
  } catch (...) {
    close(descriptor_);
    throw;
  }
  void* const at = mmap(nullptr, static_cast<size_t>(size()), PROT_READ, MAP_SHARED, descriptor_, 0);
  if (at == MAP_FAILED) {
    const int reason = errno;
    close(descriptor_);
    fail(Status::model_file, "%s cannot be mapped: %s", path.c_str(), std::strerror(reason));
  }
  data_ = static_cast<const uint8_t*>(at);
  std::lock_guard<std::mutex> hold(changing);
  watch_bus_errors();
  for (guard_ = Guard::first; guard_ && guard_->end; guard_ = guard_->next) {}
  if (!guard_) {
    guard_ = new Guard;
    guard_->next = Guard::first;
    Guard::first.store(guard_, std::memory_order_release);
  }
  guard_->damaged = -1;
  guard_->begin = reinterpret_cast<uintptr_t>(data_);
  const uintptr_t end = guard_->begin + (size() + page_size - 1) / page_size * page_size;
  guard_->end.store(end, std::memory_order_release);
}

MappedFile::~MappedFile() {
  if (guard_) {
    std::lock_guard<std::mutex> hold(changing);
    guard_->end = 0;
  }
  if (data_) munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size()));
  close(descriptor_);
}

// Uses system calls, because the mapping has zeros in place of unreadable bytes. All samples are requested first, so
// that one wait covers all of them.
uint64_t MappedFile::checksum() const {
  const int64_t pages = (size() + kSampleBytes - 1) / kSampleBytes, count = std::min(pages, kSamples);
  const auto offset = [&](int64_t sample) {
    return (count > 1 ? sample * (pages - 1) / (count - 1) : 0) * kSampleBytes;
  };
  for (int64_t i = 0; i < count; ++i) posix_fadvise(descriptor_, offset(i), kSampleBytes, POSIX_FADV_WILLNEED);
  uint64_t sum = 0, words[kSampleBytes / 8];
  for (int64_t i = 0; i < count; ++i) {
    std::memset(words, 0, sizeof words);  // bytes after the end of the file
    if (pread(descriptor_, words, static_cast<size_t>(std::min(kSampleBytes, size() - offset(i))), offset(i)) < 0)
      fail(Status::model_file, "%s cannot be read at byte %" PRId64 ": %s", path_.c_str(), offset(i),
           std::strerror(errno));
    for (uint64_t word : words) {
      sum = (sum ^ word) * 0x9e3779b97f4a7c15u;  // odd, so no difference of a word is lost
      sum ^= sum >> 32;
    }
  }
  return sum;
}

// The last page of a shortened file reads as zeros without a signal, so the length is always checked. A rewritten file
// may have the same length, so its time is checked too.
void MappedFile::check() const {
  struct stat now;
  if (fstat(descriptor_, &now) != 0)
    fail(Status::model_file, "%s cannot be read: %s", path_.c_str(), std::strerror(errno));
  if (now.st_size < size())
    fail(Status::model_file,
         "%s ends at byte %" PRId64 " of the %" PRId64
         " it had when it was opened: it changed while it was loaded; start again",
         path_.c_str(), static_cast<int64_t>(now.st_size), size());
  // Every time, not once: a writer sets the time before the bytes. It takes 0.1 ms, and only for a file that was
  // touched.
  if (!written_to_ &&
      (now.st_mtim.tv_sec != status_.st_mtim.tv_sec || now.st_mtim.tv_nsec != status_.st_mtim.tv_nsec) &&
      checksum() != checksum_)
    fail(Status::model_file, "%s was written to while it was loaded: start again", path_.c_str());
  {
    std::lock_guard<std::mutex> hold(rejecting_);
    if (!rejected_.empty()) fail(Status::model_file, "%s", rejected_.c_str());
  }
  const int64_t damaged = guard_ ? guard_->damaged.load(std::memory_order_acquire) : -1;
  if (damaged >= 0)
    fail(Status::model_file, "%s cannot be read at byte %" PRId64 ": input/output error", path_.c_str(), damaged);
}

bool MappedFile::has_failed() const {
  return is_rejected_ || (guard_ && guard_->damaged.load(std::memory_order_acquire) >= 0);
}

void MappedFile::reject(const std::string& why) const {
  std::lock_guard<std::mutex> hold(rejecting_);
  if (rejected_.empty()) rejected_ = why;
  is_rejected_ = true;
}

void MappedFile::will_need(int64_t offset, int64_t bytes) const {
  const int64_t begin = offset / page_size * page_size;
  madvise(const_cast<uint8_t*>(data_) + begin, static_cast<size_t>(offset + bytes - begin), MADV_WILLNEED);
}

void MappedFile::give_back(int64_t offset, int64_t bytes, bool cache) const {
  madvise(const_cast<uint8_t*>(data_) + offset, static_cast<size_t>(bytes), MADV_DONTNEED);
  if (cache) posix_fadvise(descriptor_, offset, bytes, POSIX_FADV_DONTNEED);
}

}  // namespace ckdist
