#include "comm/bootstrap/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/page.h"

namespace ckdist {

Segment::Mapping::~Mapping() {
  if (data) munmap(data, size_t(bytes));
  if (fd >= 0) close(fd);
}

void Segment::map(int fd, int64_t bytes) {
  // A huge page of the file begins at a huge page boundary of the addresses.
  void* const room =
      mmap(nullptr, size_t(bytes + kHugePage), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  uint8_t* const base =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(room) + kHugePage - 1) / kHugePage * kHugePage);
  void* const at =
      room == MAP_FAILED ? room : mmap(base, size_t(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  const int error = errno;
  if (room != MAP_FAILED) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(room), begin = reinterpret_cast<uintptr_t>(base);
    const uintptr_t page = uintptr_t(page_bytes());
    const uintptr_t end = at == MAP_FAILED ? begin : begin + (uintptr_t(bytes) + page - 1) / page * page;
    if (begin > first) munmap(room, begin - first);
    if (first + bytes + kHugePage > end) munmap(reinterpret_cast<void*>(end), first + bytes + kHugePage - end);
  }
  if (at == MAP_FAILED)
    fail(Status::capacity, "cannot map %lld bytes of shared memory: %s", (long long)bytes, std::strerror(error));
  madvise(at, size_t(bytes), MADV_HUGEPAGE);  // if the system allows it for shared memory
  mapping_->data = static_cast<uint8_t*>(at);
  mapping_->bytes = bytes;
}

void Segment::collapse(uint8_t* begin, int64_t bytes) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1
  const uintptr_t from = (reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(begin) + uintptr_t(bytes)) / kHugePage * kHugePage;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, kCollapse);
}

void Segment::place_huge(uint8_t* begin, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kHugePage) begin[at] = 0;  // chooses the node of the huge page
  collapse(begin, bytes);
}

struct Segment::Registry {  // of the segments that this process created
  std::mutex lock;
  std::map<std::string, std::weak_ptr<Mapping>> made;
};

Segment::Registry& Segment::registry() {
  static auto* only = new Registry;  // never destroyed: threads may outlive static objects
  return *only;
}

Segment::Segment(int64_t bytes, bool reserved) : mapping_(std::make_shared<Mapping>()) {
  constexpr unsigned kCloseOnExec = 1, kHugeTwoMegabytes = 4 | 21u << 26;  // MFD_CLOEXEC, MFD_HUGETLB | MFD_HUGE_2MB
  mapping_->fd = int(syscall(SYS_memfd_create, "ckdist", kCloseOnExec | (reserved ? kHugeTwoMegabytes : 0)));
  if (mapping_->fd < 0 || ftruncate(mapping_->fd, bytes))
    fail(Status::native, "cannot create shared memory of %lld bytes: %s", (long long)bytes, std::strerror(errno));
  mapping_->path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(mapping_->fd);
  map(mapping_->fd, bytes);
  std::lock_guard<std::mutex> hold(registry().lock);
  auto& made = registry().made;
  for (auto at = made.begin(); at != made.end();) at = at->second.expired() ? made.erase(at) : std::next(at);
  made[mapping_->path] = mapping_;
}

Segment::Segment(const std::string& path, int64_t bytes) {
  {
    std::lock_guard<std::mutex> hold(registry().lock);
    const auto at = registry().made.find(path);
    if (at != registry().made.end()) mapping_ = at->second.lock();
  }
  if (mapping_ && mapping_->bytes >= bytes) return;
  mapping_ = std::make_shared<Mapping>();
  mapping_->path = path;
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info;
  if (fd < 0 || fstat(fd, &info) || info.st_size < bytes) {
    const int error = fd < 0 ? errno : EINVAL;
    if (fd >= 0) close(fd);
    fail(Status::comm, "cannot open another rank's shared memory %s of %lld bytes: %s", path.c_str(), (long long)bytes,
         std::strerror(error));
  }
  try {
    map(fd, bytes);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
}

}  // namespace ckdist
