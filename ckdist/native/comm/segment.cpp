#include "comm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace ckdist {

Segment::Segment(int64_t bytes) : size_(bytes), fd_(int(syscall(SYS_memfd_create, "ckdist", MFD_CLOEXEC))) {
  if (fd_ < 0 || ftruncate(fd_, bytes)) {
    const int reason = errno;
    if (fd_ >= 0) close(fd_);
    fail(Status::native, "cannot create shared memory of %lld bytes: %s", (long long)bytes, std::strerror(reason));
  }
  path_ = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd_);
  map();
}

Segment::Segment(const std::string& path, int64_t bytes) : size_(bytes), fd_(open(path.c_str(), O_RDWR | O_CLOEXEC)), path_(path) {
  struct stat info;
  if (fd_ < 0) fail(Status::comm, "cannot open a peer's shared memory %s: %s", path.c_str(), std::strerror(errno));
  if (fstat(fd_, &info) || info.st_size < bytes) {
    close(fd_);
    fail(Status::comm, "a peer's shared memory %s has %lld bytes, and %lld are needed: start all ranks with the same version", path.c_str(),
         (long long)info.st_size, (long long)bytes);
  }
  map();
}

void Segment::map() {
  void* at = mmap(nullptr, size_t(size_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (at == MAP_FAILED) {
    const int reason = errno;
    close(fd_);
    fail(Status::capacity, "cannot map %lld bytes of shared memory: %s", (long long)size_, std::strerror(reason));
  }
  data_ = static_cast<uint8_t*>(at);
  madvise(at, size_t(size_), MADV_HUGEPAGE);
}

Segment::~Segment() {
  munmap(data_, size_t(size_));
  close(fd_);
}

}  // namespace ckdist
