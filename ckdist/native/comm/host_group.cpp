#include "comm/host_group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include "core/error.h"

namespace ckdist {

namespace {

constexpr int64_t kTickNs = 100'000'000;
constexpr int64_t kPage = 4096;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Start time of a process in clock ticks, 0 when it is gone or a zombie: tells a dead peer from a reused pid.
uint64_t start_time(int pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "r");
  if (!file) return 0;
  const size_t n = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[n] = 0;
  const char* p = std::strrchr(text, ')');  // the name may hold anything
  char state = 0;
  unsigned long long start = 0;
  if (!p || std::sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &start) != 2) return 0;
  return state == 'Z' || state == 'X' ? 0 : start;
}

}  // namespace

struct HostGroup::Line {
  Signal arrived;  // epochs this rank has reached
  std::atomic<int32_t> pid, abandoned;
  std::atomic<uint64_t> start;
  char pad[48];
};

struct HostGroup::Header {
  Signal message;  // messages published
  int64_t message_ints;
  char data_path[56];
  Line lines[];
};

HostGroup::HostGroup(const std::string& path, int rank, int size, int spins, double timeout_s)
    : Group(rank, size), path_(path), spins_(spins), timeout_ns_(int64_t(timeout_s * 1e9)) {
  if (size > kMaxRanks) fail(Status::config, "%d ranks on one host; at most %d are supported", size, kMaxRanks);
  header_bytes_ = round_up(sizeof(Header) + size * sizeof(Line), kPage);
  header_ = reinterpret_cast<Header*>(rank == 0 ? create(header_bytes_, &path_) : map(path_, header_bytes_));
  Line& own = header_->lines[rank];
  own.start = start_time(getpid());
  own.pid = getpid();
}

HostGroup::~HostGroup() {
  if (data_) munmap(data_, data_bytes_);
  munmap(header_, header_bytes_);
}

// A segment without a name in any file system (no limit of /dev/shm applies, nothing is left behind); peers open it
// through this process's descriptor at *path.
uint8_t* HostGroup::create(int64_t bytes, std::string* path) {
  const int fd = int(syscall(SYS_memfd_create, "ckdist", MFD_CLOEXEC));
  if (fd < 0 || ftruncate(fd, bytes)) fail(Status::native, "cannot create shared memory of %lld bytes: %s", (long long)bytes, std::strerror(errno));
  *path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd);
  return map(*path, bytes);
}

uint8_t* HostGroup::map(const std::string& path, int64_t bytes) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info;
  if (fd < 0 || fstat(fd, &info) || info.st_size < bytes)
    fail(Status::comm, "cannot open rank 0's shared memory %s of %lld bytes: %s", path.c_str(), (long long)bytes, std::strerror(errno));
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) fail(Status::capacity, "cannot map %lld bytes of shared memory: %s", (long long)bytes, std::strerror(errno));
  return static_cast<uint8_t*>(at);
}

void HostGroup::reserve(int64_t partial_floats, int64_t logit_rows, int64_t vocab, int64_t message_ints) {
  vocab_ = vocab;
  mail_ints_ = message_ints;
  partial_bytes_ = round_up(partial_floats * 4, kPage);
  logits_offset_ = partial_bytes_ * kSlots * size;
  mail_offset_ = logits_offset_ + round_up(logit_rows * vocab * 4, kPage);
  data_bytes_ = mail_offset_ + round_up(message_ints * 4, kPage);
  std::string path;
  if (rank == 0) {
    data_ = create(data_bytes_, &path);
    std::snprintf(header_->data_path, sizeof header_->data_path, "%s", path.c_str());
    meet(-1);
  } else {
    meet(-1);
    data_ = map(header_->data_path, data_bytes_);
  }
  std::memset(partial(0), 0, partial_bytes_ * kSlots);  // first touch by the owner
  meet(-1);
}

void HostGroup::check_alive(int r, int step) const {
  const Line& line = header_->lines[r];
  const int pid = line.pid;
  if (line.abandoned) fail(Status::comm, "rank %d (pid %d) failed at or before step %d; its own message says why", r, pid, step);
  if (pid && start_time(pid) != line.start) fail(Status::comm, "rank %d (pid %d) died at or before step %d", r, pid, step);
}

void HostGroup::meet(int step) {
  const uint32_t epoch = ++epoch_;
  header_->lines[rank].arrived.set(epoch);
  for (int i = 1; i < size; i++) {
    const int r = (rank + i) % size;
    int64_t start = 0;
    header_->lines[r].arrived.wait(
        spins_, kTickNs, [&](uint32_t v) { return int32_t(v - epoch) >= 0; },
        [&] {
          check_alive(r, step);
          const int64_t now = now_ns();
          if (!start) start = now;
          if (now - start > timeout_ns_)
            fail(Status::comm, "rank %d (pid %d) did not reach step %d within %.0f s", r, header_->lines[r].pid.load(), step, timeout_ns_ / 1e9);
        });
  }
}

void HostGroup::publish(const int32_t* message, int64_t ints) {
  if (ints > mail_ints_) fail(Status::native, "message of %lld ints is larger than the mailbox of %lld", (long long)ints, (long long)mail_ints_);
  if (ints) std::memcpy(data_ + mail_offset_, message, ints * 4);
  header_->message_ints = ints;
  header_->message.set(++message_);
}

const int32_t* HostGroup::receive(int64_t* ints) {
  const uint32_t wanted = ++message_;
  header_->message.wait(spins_, 5 * kTickNs, [&](uint32_t v) { return int32_t(v - wanted) >= 0; }, [&] { check_alive(0, 0); });
  *ints = header_->message_ints;
  return reinterpret_cast<const int32_t*>(data_ + mail_offset_);
}

float* HostGroup::partial(int slot) { return reinterpret_cast<float*>(data_ + (int64_t(rank) * kSlots + slot) * partial_bytes_); }

void HostGroup::reduce(int, int64_t, int step) { meet(step); }

int HostGroup::parts(int slot, const float** out) {
  for (int r = 0; r < size; r++) out[r] = reinterpret_cast<const float*>(data_ + (int64_t(r) * kSlots + slot) * partial_bytes_);
  return size;
}

float* HostGroup::logits(int64_t column, int64_t, int64_t* stride) {
  *stride = vocab_;
  return reinterpret_cast<float*>(data_ + logits_offset_) + column;
}

void HostGroup::gather(int64_t, int64_t, int64_t, int step) { meet(step); }

const float* HostGroup::gathered() { return reinterpret_cast<const float*>(data_ + logits_offset_); }

void HostGroup::check_peers() {
  for (int r = 0; r < size; r++)
    if (r != rank) check_alive(r, 0);
}

void HostGroup::abandon() {
  Line& own = header_->lines[rank];
  own.abandoned = 1;
  own.arrived.set(epoch_);  // wakes who sleeps on it; they look and give up
}

}  // namespace ckdist
