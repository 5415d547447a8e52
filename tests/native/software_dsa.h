// A Data Streaming Accelerator in software, for machines without one. It reads descriptors byte by byte at the offsets
// that Intel publishes (Data Streaming Accelerator Architecture Specification, revision 3.0, chapter 8), and checks
// them by sections 5.4 and 5.5. It does not use the structs that wrote them. Settings make it fail in every way of
// 5.8.1, be full, lose descriptors, or hang.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "copy_engines/dsa_engine.h"

struct SoftwareDsa {
  // Limits.
  int64_t max_transfer = 1 << 20, max_batch = 16,
          capacity = 0;  // capacity > 0: a dedicated queue, which drops descriptors if it is full
  bool block_on_fault = false;
  // Behaviour.
  bool deferred = false;   // descriptors wait for run()
  bool backwards = false;  // run() takes the newest first
  int64_t full = 0;        // submissions to refuse; < 0: all
  int64_t errors = 0;      // moves that end with `error` instead of copying
  uint8_t error = 0x20;
  int64_t faults = 0;  // moves that end with a page fault after `fault_after` bytes
  int64_t fault_after = 0;
  uint8_t fault_info = 0;        // 1: the address is masked
  uint64_t fault_address = 0;    // 0: the correct one
  bool fault_from_end = false;   // copied from the end (result 1)
  bool real_faults = false;      // an untouched destination page is a page fault
  bool lost = false;             // descriptors vanish
  bool hangs = false;            // close() never succeeds
  int64_t batch_stops_at = -1;   // a batch ends (0x06) after this number of descriptors
  int64_t record_left_out = -1;  // of that descriptor of a batch
  // Record of events.
  std::vector<std::array<uint8_t, 64>> seen;  // in order of arrival; those of a batch after the batch
  int64_t submissions = 0, dropped = 0, moved_bytes = 0, page_faults = 0;
  const char* broken = "";  // errors that real hardware would not report

  bool submit(const uint8_t* d) {
    ++submissions;
    if (reinterpret_cast<uintptr_t>(d) % 64) broken = "a descriptor is not aligned to 64 bytes";
    if (full) {
      if (full > 0) --full;
      return false;
    }
    std::array<uint8_t, 64> copy;
    std::memcpy(copy.data(), d, 64);
    seen.push_back(copy);
    if (lost) return true;
    if (capacity > 0 && static_cast<int64_t>(waiting.size()) >= capacity) {
      ++dropped;  // 0x53, which only the kernel sees
      return true;
    }
    waiting.push_back(copy);
    if (!deferred) run(-1);
    return true;
  }

  // Executes up to `most` descriptors; negative: all.
  void run(int64_t most) {
    for (; !waiting.empty() && most; --most) {
      const std::array<uint8_t, 64> d = backwards ? waiting.back() : waiting.front();
      backwards ? waiting.pop_back() : waiting.pop_front();
      execute(d.data(), false, false);
    }
  }

  std::deque<std::array<uint8_t, 64>> waiting;

 private:
  static uint64_t number(const uint8_t* bytes, int count) {
    uint64_t value = 0;
    for (int i = count - 1; i >= 0; --i) value = value << 8 | bytes[i];
    return value;
  }
  static uint8_t* pointer(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

  void complete(const uint8_t* d, uint8_t status, uint32_t completed = 0, uint64_t address = 0, uint8_t result = 0,
                uint8_t info = 0, uint32_t flags = 0) {
    const uint32_t own_flags = static_cast<uint32_t>(number(d + 4, 3));
    const uint64_t record = number(d + 8, 8);
    if (!(own_flags & 4)) {
      broken = "no completion record address";
      return;
    }
    if (record % 32) {
      broken = "a completion record is not aligned to 32 bytes";
      return;
    }
    if (!(own_flags & 8) && (status == 1 || status == 2 || status == 5)) return;
    uint8_t bytes[32] = {};
    bytes[1] = result;
    bytes[2] = info;
    for (int i = 0; i < 4; ++i) bytes[4 + i] = static_cast<uint8_t>(completed >> 8 * i);
    for (int i = 0; i < 8; ++i) bytes[8 + i] = static_cast<uint8_t>(address >> 8 * i);
    for (int i = 0; i < 3; ++i) bytes[16 + i] = static_cast<uint8_t>(flags >> 8 * i);
    std::memcpy(pointer(record) + 1, bytes + 1, 31);
    __atomic_store_n(pointer(record), status, __ATOMIC_RELEASE);
  }

  // Returns true for a move that succeeded, or a batch of only such moves.
  bool execute(const uint8_t* d, bool in_batch, bool silent) {
    const auto end = [&](uint8_t status, uint32_t flags = 0) {
      if (!silent) complete(d, status, 0, 0, 0, 0, flags);
      return status == 1;
    };
    const uint32_t flags = static_cast<uint32_t>(number(d + 4, 3));
    const uint8_t operation = d[7];
    if (operation != 3 && (operation != 1 || in_batch)) return end(0x10);
    uint32_t allowed = 4 | 8 | (operation == 3 ? 0x100u : 0u) | (operation == 3 && block_on_fault ? 2u : 0u);
    if (!(flags & 4)) allowed &= ~8u;
    if (flags & ~allowed) return end(0x11, flags & ~allowed);
    if (number(d, 4)) return end(0x12);  // what ENQCMD fills in
    if (number(d + 36, 2) || number(d + 38, 2)) return end(0x12);
    for (int i = 40; i < 64; ++i)
      if (d[i]) return end(0x12);
    return operation == 3 ? move(d, flags, silent, end) : batch(d, end);
  }

  template <class End>
  bool move(const uint8_t* d, uint32_t flags, bool silent, End end) {
    const uint64_t from = number(d + 16, 8), to = number(d + 24, 8), bytes = number(d + 32, 4);
    if (!bytes || bytes > static_cast<uint64_t>(max_transfer)) return end(0x13);
    if (from < to + bytes && to < from + bytes) return end(0x16);
    if (errors) {
      if (errors > 0) --errors;
      return end(error);
    }
    uint64_t whole = bytes, address = 0;
    uint8_t write = 0x80;
    if (faults && static_cast<uint64_t>(fault_after) < bytes && !(flags & 2)) {
      --faults;
      whole = static_cast<uint64_t>(fault_after);
      address = fault_address ? fault_address : (to + whole) & ~uint64_t(4095);
    } else if (real_faults && !(flags & 2)) {
      for (uint64_t page = to & ~uint64_t(4095); page < to + bytes && whole == bytes; page += 4096) {
        unsigned char present = 0;
        if (mincore(pointer(page), 4096, &present) == 0 && !(present & 1))
          whole = std::max(page, to) - to, address = page;
      }
    }
    const bool reversed = whole < bytes && fault_from_end;
    std::memmove(pointer(to + (reversed ? bytes - whole : 0)), pointer(from + (reversed ? bytes - whole : 0)), whole);
    moved_bytes += static_cast<int64_t>(whole);
    if (whole == bytes) return end(1);
    ++page_faults;
    if (!silent)
      complete(d, 3 | write, static_cast<uint32_t>(whole), fault_info & 1 ? 0 : address, reversed, fault_info);
    return false;
  }

  template <class End>
  bool batch(const uint8_t* d, End end) {
    const uint64_t list = number(d + 16, 8), count = number(d + 32, 4);
    if (list % 64) return end(0x18);
    if (number(d + 24, 8)) return end(0x12);
    if (count < 2 || count > static_cast<uint64_t>(max_batch)) return end(0x14);
    bool good = true;
    for (uint64_t i = 0; i < count; ++i) {
      if (static_cast<int64_t>(i) == batch_stops_at) {
        complete(d, 6, static_cast<uint32_t>(i), list + 64 * i);
        return false;
      }
      std::array<uint8_t, 64> inner;
      std::memcpy(inner.data(), pointer(list + 64 * i), 64);
      seen.push_back(inner);
      good = execute(inner.data(), true, static_cast<int64_t>(i) == record_left_out) && good;
    }
    complete(d, good ? 1 : 5, static_cast<uint32_t>(count));
    return good;
  }
};

class SoftwarePortal final : public ckdist::DsaPortal {
 public:
  explicit SoftwarePortal(SoftwareDsa* device) : device_(device) {}
  bool submit(const void* descriptor) override { return device_->submit(static_cast<const uint8_t*>(descriptor)); }
  bool close(int64_t) override {
    if (device_->hangs) return false;
    if (!device_->lost) device_->run(-1);  // the kernel waits for descriptors in flight
    device_->lost = true;
    return true;
  }

 private:
  SoftwareDsa* const device_;
};
