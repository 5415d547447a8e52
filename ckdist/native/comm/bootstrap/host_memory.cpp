#include "comm/bootstrap/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "core/arena.h"
#include "core/error.h"

namespace ckdist {

namespace {

constexpr int64_t kPage = 4096;
// Bytes between two arenas. Buffers at equal offsets in arenas at a distance of a power of two would differ only in
// high bits of their addresses. Some L1 caches (AMD's) ignore these bits in their way prediction: folding two such
// buffers takes twice as long.
constexpr int64_t kGap = 3 * Segment::kHugePage;

}  // namespace

HostMemory::HostMemory(const std::string& path, int index, int count, int64_t arena_bytes)
    : index(index),
      count(count),
      arena_bytes_((arena_bytes + kPage - 1) / kPage * kPage),
      stride_(arena_bytes_ + kGap),
      segment_(index ? Segment(path, count * stride_) : Segment(count * stride_)) {
  free_[0] = arena_bytes_;
}

void* HostMemory::allocate(int64_t bytes, bool touched) {
  const int64_t wanted = std::max<int64_t>(kPage, (bytes + kPage - 1) / kPage * kPage);
  // The system's numbers are in several files. A small buffer is not worth reading them.
  const bool fits = wanted < Segment::kHugePage || wanted <= available_memory();
  std::lock_guard<std::mutex> lock(mutex_);
  // Large buffers begin at a huge page boundary, if there is room.
  const auto gap = [&](int64_t offset, int64_t unit) {
    return int64_t(-reinterpret_cast<uintptr_t>(arena(index) + offset) % uint64_t(unit));
  };
  int64_t unit = wanted >= Segment::kHugePage ? Segment::kHugePage : kPage;
  const auto find = [&] {
    return std::find_if(free_.begin(), free_.end(),
                        [&](const auto& f) { return f.second - gap(f.first, unit) >= wanted; });
  };
  auto place = find();
  if (place == free_.end()) unit = kPage, place = find();
  if (bytes < 0 || place == free_.end() || !fits) {
    int64_t largest = 0;
    for (const auto& f : free_) largest = std::max(largest, f.second);
    fail(Status::capacity,
         "%lld bytes were requested of the shared arena, whose largest free part has %lld (%lld bytes of memory are "
         "available): "
         "make the arena larger or release buffers",
         (long long)bytes, (long long)largest, (long long)available_memory());
  }
  const auto [begin, room] = *place;
  const int64_t skipped = gap(begin, unit), offset = begin + skipped, left = room - skipped - wanted;
  if (skipped) place->second = skipped;
  else free_.erase(place);
  if (left) free_[offset + wanted] = left;
  used_[offset] = wanted;
  uint8_t* data = arena(index) + offset;
  if (touched) {
    std::memset(data, 0, size_t(wanted));
    Segment::collapse(data, wanted);
  } else {
    Segment::place_huge(data, wanted);
  }
  return data;
}

void HostMemory::release(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto used = used_.find(static_cast<uint8_t*>(data) - arena(index));
  if (used == used_.end()) return;
  madvise(data, size_t(used->second), MADV_REMOVE);  // releases the pages
  auto at = free_.emplace(used->first, used->second).first;
  used_.erase(used);
  if (const auto next = std::next(at); next != free_.end() && at->first + at->second == next->first)
    at->second += next->second, free_.erase(next);
  if (at != free_.begin())
    if (const auto before = std::prev(at); before->first + before->second == at->first)
      before->second += at->second, free_.erase(at);
}

int64_t HostMemory::offset(const void* data, int64_t bytes) const {
  const int64_t at = static_cast<const uint8_t*>(data) - arena(index);
  return at >= 0 && bytes <= arena_bytes_ && at <= arena_bytes_ - bytes ? at : -1;
}

}  // namespace ckdist
