#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/numa.h"
#include "core/number_file.h"

// Poisons the rest of an arena's last page, so that a sanitized build detects overruns.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) static_cast<void>(0)
#endif

namespace ckdist {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int kTwoMegabytes = 21 << 26;       // MAP_HUGE_2MB
constexpr int kPopulateWrite = 23;            // MADV_POPULATE_WRITE, Linux 5.14
constexpr int64_t kPopulatePart = 256 << 20;  // bytes worth a thread of their own
constexpr int64_t kPopulateThreads = 16;
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
std::atomic<int64_t> promised{0};
std::mutex promised_lock;
std::map<uint8_t*, int64_t> promised_arenas;  // address, bytes; guarded by promised_lock

int64_t untouched(uint8_t* begin, int64_t bytes) {
  constexpr int64_t kPage = 4096, kPages = 1 << 16;
  std::vector<unsigned char> resident(size_t(std::clamp<int64_t>((bytes + kPage - 1) / kPage, 0, kPages)));
  int64_t pages = 0;
  for (int64_t at = 0; at < bytes; at += kPages * kPage) {
    const int64_t part = std::min(kPages * kPage, bytes - at);
    if (mincore(begin + at, size_t(part), resident.data()) != 0) continue;
    pages += std::count_if(resident.begin(), resident.begin() + part / kPage, [](auto flags) { return !(flags & 1); });
  }
  return pages * kPage;
}

// Available bytes in the control group `group` of the hierarchy at `mount` and in its ancestors. Page cache counts as
// available.
int64_t room_below(const std::string& mount, std::string group, const char* limit_file, const char* used_file,
                   const char* cached) {
  int64_t room = kNoLimit;
  for (;;) {
    const std::string folder = mount + group;
    const int64_t limit = read_number(folder + limit_file, "", kNoLimit);
    if (limit < kNoLimit / 2) {  // version 1 writes a number near the largest if there is no limit
      const int64_t left =
          limit - read_number(folder + used_file, "", 0) + read_number(folder + "/memory.stat", cached, 0);
      room = std::min(room, std::max<int64_t>(left, 0));
    }
    const size_t slash = group.rfind('/');
    if (group.empty() || slash == std::string::npos) return room;
    group.erase(slash);
  }
}

// Available bytes in the control groups, of both versions, of this process.
int64_t control_group_room() {
  std::FILE* file = std::fopen("/proc/self/cgroup", "re");
  if (!file) return kNoLimit;
  char line[4096];
  int64_t room = kNoLimit;
  while (std::fgets(line, sizeof line, file)) {
    const char* first = std::strchr(line, ':');
    const char* second = first ? std::strchr(first + 1, ':') : nullptr;
    if (!second) continue;
    const std::string controllers(first + 1, second), group(second + 1, std::strcspn(second + 1, "\n"));
    if (controllers.empty()) {
      for (const char* mount : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"})
        room = std::min(room, room_below(mount, group, "/memory.max", "/memory.current", "inactive_file "));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      room = std::min(room, room_below("/sys/fs/cgroup/memory", group, "/memory.limit_in_bytes",
                                       "/memory.usage_in_bytes", "total_inactive_file "));
    }
  }
  std::fclose(file);
  return room;
}

// Unclaimed explicit huge pages: the sum over the wanted nodes, or of the machine.
int64_t unclaimed_huge_pages(const MemoryNodes& wanted) {
  const std::string machine = "/sys/kernel/mm/hugepages/hugepages-2048kB";
  int64_t pages = std::max<int64_t>(
      0, read_number(machine + "/free_hugepages", "", 0) - read_number(machine + "/resv_hugepages", "", 0));
  int64_t there = 0;
  for (int node : wanted.nodes)
    there += read_number(
        "/sys/devices/system/node/node" + std::to_string(node) + "/hugepages/hugepages-2048kB/free_hugepages", "", 0);
  return wanted.nodes.empty() ? pages : std::min(pages, there / std::max(1, wanted.sharers));
}

// Maps `bytes` of explicit huge pages on the wanted nodes. Returns null if too few are reserved.
uint8_t* map_huge(int64_t bytes, const MemoryNodes& wanted) {
  if (unclaimed_huge_pages(wanted) < bytes / kHugePage) return nullptr;
  void* begin = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | kTwoMegabytes, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  // The reserve belongs to the machine, not to a node: with a strict bind the node's part could be used up.
  place_pages(begin, bytes, wanted, false);
  if (populate_huge(static_cast<uint8_t*>(begin), bytes)) return static_cast<uint8_t*>(begin);
  munmap(begin, static_cast<size_t>(bytes));
  return nullptr;
}

}  // namespace

bool populate_huge(uint8_t* begin, int64_t bytes) {
  const int64_t parts = std::clamp<int64_t>(bytes / kPopulatePart, 1, kPopulateThreads);
  std::atomic<bool> made{true};
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t first = bytes / kHugePage * i / parts * kHugePage,
                  last = bytes / kHugePage * (i + 1) / parts * kHugePage;
    threads.emplace_back([=, &made] {
      if (madvise(begin + first, static_cast<size_t>(last - first), kPopulateWrite) != 0) made = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

int64_t unclaimed_huge_bytes() { return unclaimed_huge_pages(memory_nodes()) * kHugePage; }

int64_t available_memory() {
  const int64_t kilobytes = read_number("/proc/meminfo", "MemAvailable:", kNoLimit / 1024);
  const int64_t machine = kilobytes * 1024, group = control_group_room();
  return machine < group ? machine : group;
}

void promise_memory(int64_t bytes) { promised += bytes; }

int64_t promised_memory() {
  std::lock_guard<std::mutex> hold(promised_lock);
  int64_t bytes = promised;
  for (const auto& [begin, size] : promised_arenas) bytes += untouched(begin, size);
  return bytes;
}

void Arena::promise() {
  if (!data_ || promised_) return;
  promised_ = true;
  std::lock_guard<std::mutex> hold(promised_lock);
  promised_arenas.emplace(data_, size_);
}

void require_memory(int64_t bytes, const char* purpose) {
  const int64_t available = std::max<int64_t>(0, available_memory() - promised_memory());
  if (bytes > available)
    fail(Status::capacity,
         "%s need %.2f GB of memory, and %.2f GB are available: use more ranks or hosts, or a smaller quantisation",
         purpose, bytes / 1e9, available / 1e9);
}

Arena::Arena(int64_t bytes, const char* purpose)
    : data_(nullptr), size_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
  if (size_ <= 0) {
    size_ = 0;
    return;
  }
  const MemoryNodes wanted = memory_nodes();
  if ((data_ = map_huge(size_, wanted))) return;  // reserved pages do not count as available memory
  require_memory(size_, purpose);
  const int64_t reserved = size_ + kHugePage;
  void* begin = mmap(nullptr, static_cast<size_t>(reserved), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED)
    fail(Status::capacity, "%s need %.2f GB of memory, which the system refused (%.2f GB are available)", purpose,
         size_ / 1e9, available_memory() / 1e9);
  uint8_t* const first = static_cast<uint8_t*>(begin);
  const int64_t head = (kHugePage - reinterpret_cast<intptr_t>(first) % kHugePage) % kHugePage;
  data_ = first + head;
  if (head) munmap(first, static_cast<size_t>(head));
  if (kHugePage - head) munmap(data_ + size_, static_cast<size_t>(kHugePage - head));
  madvise(data_, static_cast<size_t>(bytes / kHugePage * kHugePage), MADV_HUGEPAGE);  // small arenas keep small pages
  place_pages(data_, size_, wanted, true);
  ASAN_POISON_MEMORY_REGION(data_ + bytes, size_ - bytes);
}

Arena::~Arena() {
  if (!data_) return;
  if (promised_) {
    std::lock_guard<std::mutex> hold(promised_lock);
    promised_arenas.erase(data_);
  }
  ASAN_UNPOISON_MEMORY_REGION(data_, size_);
  munmap(data_, static_cast<size_t>(size_));
}

}  // namespace ckdist
