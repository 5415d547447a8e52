#include "core/arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "core/error.h"

// A sanitized build sees what passes the end of an arena, whose last page is rarely full.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) static_cast<void>(0)
#endif

namespace ckdist {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int kPreferred = 1;         // MPOL_PREFERRED: that node while it has room, then any
constexpr int kMaxNodes = 1024;       // as the kernel's largest configuration
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// The number behind `key` in a file of "key number" lines, or the number that the file begins with when key is empty; else `absent`.
int64_t read_number(const std::string& path, const std::string& key, int64_t absent) {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return absent;
  char line[256];
  int64_t result = absent;
  while (std::fgets(line, sizeof line, file)) {
    if (std::strncmp(line, key.c_str(), key.size()) != 0) continue;
    char* end = nullptr;
    const long long value = std::strtoll(line + key.size(), &end, 10);
    if (end != line + key.size() && value >= 0) result = value;
    break;
  }
  std::fclose(file);
  return result;
}

// Room left in the control group (version 2) of this process and in those above it.
int64_t control_group_room() {
  std::FILE* file = std::fopen("/proc/self/cgroup", "re");
  if (!file) return kNoLimit;
  char line[4096];
  std::string group;
  while (std::fgets(line, sizeof line, file))
    if (!std::strncmp(line, "0::", 3)) group = std::string(line + 3, std::strcspn(line + 3, "\n"));
  std::fclose(file);
  int64_t room = kNoLimit;
  for (;;) {
    const std::string folder = "/sys/fs/cgroup" + group;
    const int64_t limit = read_number(folder + "/memory.max", "", kNoLimit);
    if (limit != kNoLimit) {
      const int64_t used = read_number(folder + "/memory.current", "", 0);
      const int64_t reclaimable = read_number(folder + "/memory.stat", "inactive_file ", 0);  // page cache
      const int64_t left = limit - used + reclaimable;
      if (left < room) room = left < 0 ? 0 : left;
    }
    const size_t slash = group.rfind('/');
    if (group.empty() || slash == std::string::npos) return room;
    group.erase(slash);
  }
}

// Failure leaves the default policy, which places a page on the node of the thread that touches it first.
void prefer_own_node(void* begin, int64_t bytes) {
  if (access("/sys/devices/system/node/node1", F_OK) != 0) return;
  unsigned cpu = 0, node = 0;
  if (syscall(SYS_getcpu, &cpu, &node, nullptr) != 0 || node >= kMaxNodes) return;
  unsigned long mask[kMaxNodes / (8 * sizeof(unsigned long))] = {};
  mask[node / (8 * sizeof(unsigned long))] = 1UL << (node % (8 * sizeof(unsigned long)));
  (void)syscall(SYS_mbind, begin, static_cast<unsigned long>(bytes), kPreferred, mask, static_cast<unsigned long>(kMaxNodes), 0UL);
}

}  // namespace

int64_t available_memory() {
  const int64_t kilobytes = read_number("/proc/meminfo", "MemAvailable:", kNoLimit / 1024);
  const int64_t machine = kilobytes * 1024, group = control_group_room();
  return machine < group ? machine : group;
}

Arena::Arena(int64_t bytes, const char* purpose) : data_(nullptr), size_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
  if (size_ <= 0) {
    size_ = 0;
    return;
  }
  const int64_t available = available_memory();
  if (size_ > available)
    fail(Status::capacity, "%s need %.2f GB of memory, and %.2f GB are available: use more ranks or hosts, or a smaller quantisation",
         purpose, size_ / 1e9, available / 1e9);
  const int64_t reserved = size_ + kHugePage;
  void* begin = mmap(nullptr, static_cast<size_t>(reserved), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED)
    fail(Status::capacity, "%s need %.2f GB of memory, which the system refused (%.2f GB are available)", purpose, size_ / 1e9,
         available / 1e9);
  uint8_t* const first = static_cast<uint8_t*>(begin);
  const int64_t head = (kHugePage - reinterpret_cast<intptr_t>(first) % kHugePage) % kHugePage;
  data_ = first + head;
  if (head) munmap(first, static_cast<size_t>(head));
  if (kHugePage - head) munmap(data_ + size_, static_cast<size_t>(kHugePage - head));
  madvise(data_, static_cast<size_t>(size_), MADV_HUGEPAGE);
  prefer_own_node(data_, size_);
  ASAN_POISON_MEMORY_REGION(data_ + bytes, size_ - bytes);
}

Arena::~Arena() {
  if (!data_) return;
  ASAN_UNPOISON_MEMORY_REGION(data_, size_);
  munmap(data_, static_cast<size_t>(size_));
}

}  // namespace ckdist
