#include "core/numa.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>

#include "core/number_file.h"
#include "core/page.h"

namespace ckdist {
namespace {

constexpr int kMaxNodes = 1024;  // the kernel's largest configuration
constexpr int kWordBits = 8 * sizeof(unsigned long);
constexpr unsigned long kOfAddress = 2;                                  // MPOL_F_ADDR
constexpr int kPreferred = 1, kBound = 2, kInterleaved = 3, kLocal = 4;  // as in linux/mempolicy.h

std::mutex wanted_lock;
MemoryNodes wanted_nodes;

bool set_policy(void* begin, int64_t bytes, int policy, const std::vector<int>& nodes) {
  unsigned long mask[kMaxNodes / kWordBits] = {};
  for (int node : nodes) {
    if (node < 0 || node >= kMaxNodes) return false;
    mask[node / kWordBits] |= 1UL << (node % kWordBits);
  }
  // The kernel reads one bit less than the given number.
  return syscall(SYS_mbind, begin, static_cast<unsigned long>(bytes), policy, mask,
                 static_cast<unsigned long>(kMaxNodes + 1), 0UL) == 0;
}

// Bytes of a node that are free or in the page cache.
int64_t node_room(int node) {
  const std::string path = "/sys/devices/system/node/node" + std::to_string(node) + "/meminfo",
                    name = "Node " + std::to_string(node);
  const int64_t free = read_number(path, name + " MemFree:", 0),
                cached = read_number(path, name + " Inactive(file):", 0);
  const int64_t most = std::numeric_limits<int64_t>::max() / 4096;
  return (std::min(free, most) + std::min(cached, most)) * 1024;
}

}  // namespace

void set_memory_nodes(MemoryNodes nodes) {
  std::lock_guard<std::mutex> hold(wanted_lock);
  wanted_nodes = std::move(nodes);
}

MemoryNodes memory_nodes() {
  std::lock_guard<std::mutex> hold(wanted_lock);
  return wanted_nodes;
}

void place_pages(void* begin, int64_t bytes, const MemoryNodes& wanted, bool strict) {
  if (access("/sys/devices/system/node/node1", F_OK) != 0) return;
  const int own = memory_policy(nullptr);
  if (own > 0 && own != kLocal) return;  // set by numactl
  std::vector<int> nodes = wanted.nodes;
  if (nodes.size() > 1 && set_policy(begin, bytes, kInterleaved, nodes)) return;
  if (nodes.empty()) {
    unsigned cpu = 0, node = 0;
    if (syscall(SYS_getcpu, &cpu, &node, nullptr) != 0) return;
    nodes.push_back(static_cast<int>(node));
    strict = false;
  }
  nodes.resize(1);
  if (strict && node_room(nodes[0]) / std::max(1, wanted.sharers) > bytes && set_policy(begin, bytes, kBound, nodes))
    return;
  set_policy(begin, bytes, kPreferred, nodes);
}

int memory_policy(const void* address) {
  int mode = 0;
  unsigned long mask[kMaxNodes / kWordBits] = {};
  if (syscall(SYS_get_mempolicy, &mode, mask, static_cast<unsigned long>(kMaxNodes), address,
              address ? kOfAddress : 0UL) != 0)
    return -errno;
  return mode & 0xff;  // the upper bits are flags
}

int page_nodes(uint8_t* begin, int64_t bytes, int samples, bool touch, int32_t* nodes) {
  const int64_t page = page_bytes();
  const int64_t pages = std::max<int64_t>(1, bytes / page);
  std::vector<void*> addresses;
  for (int i = 0; i < samples; i++) {
    uint8_t* address = begin + static_cast<int64_t>(static_cast<double>(pages) * i / samples) * page;
    if (touch) __atomic_fetch_or(address, uint8_t{0}, __ATOMIC_RELAXED);  // a write that keeps the content
    addresses.push_back(address);
  }
  const long status =
      syscall(SYS_move_pages, 0, static_cast<unsigned long>(samples), addresses.data(), nullptr, nodes, 0);
  return status < 0 ? -errno : 0;
}

int request_amx() {
#if defined(__x86_64__)
  constexpr int kSupported = 0x1021, kPermitted = 0x1022, kRequest = 0x1023,
                kTileData = 18;  // ARCH_{GET_XCOMP_SUPP,GET_XCOMP_PERM,REQ_XCOMP_PERM}
  unsigned long features = 0;
  if (syscall(SYS_arch_prctl, kSupported, &features) != 0 || !(features >> kTileData & 1)) return 0;
  if (syscall(SYS_arch_prctl, kRequest, kTileData) != 0) return -errno;
  return syscall(SYS_arch_prctl, kPermitted, &features) == 0 && (features >> kTileData & 1) ? 1 : -EPERM;
#else
  return 0;
#endif
}

}  // namespace ckdist
