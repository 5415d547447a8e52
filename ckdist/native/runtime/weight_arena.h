// The memory in which a rank's packed weights lie: its own alone, or a segment that the ranks of its host map.
//
// Pages exist once something is written. The first thread to write says so before, and makes a huge page where the
// system gives shared memory small ones unless asked; who has asked for which page is known to all ranks.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "comm/bootstrap/segment.h"
#include "core/arena.h"

namespace ckdist {

class WeightArena {
 public:
  // Throws Error(capacity) with both numbers where there is not the memory. The bytes are counted as taken until they
  // are (promise_memory): `written` says how many are.
  WeightArena(int64_t bytes, bool shared);
  // That of another rank, while that rank holds it.
  WeightArena(const std::string& path, int64_t bytes);
  ~WeightArena();

  uint8_t* data() const { return data_; }
  // By which other processes of this host can open it; empty unless it is shared.
  std::string path() const { return segment_ ? segment_->path() : std::string(); }

  void will_write(const uint8_t* at, int64_t bytes);
  // All of one of `parts`: where several threads write at once, it costs less before than meanwhile.
  void will_write_part(int part, int parts);
  void written(int64_t bytes);

 private:
  static int64_t shared_bytes(int64_t bytes);

  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Segment> segment_;  // instead, where it is shared
  uint8_t* data_ = nullptr;
  uint8_t* asked_ =
      nullptr;  // one byte for each huge page of a segment, at its end; null where no page need be asked for
  int64_t promised_ = 0;
};

}  // namespace ckdist
