// The memory of a rank's packed weights: private, or a segment that the ranks of its host map.
//
// Pages are allocated when they are first written. The first thread to write calls will_write() first, which makes a
// huge page if the system gives shared memory small pages by default. All ranks see which pages were already requested.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "comm/bootstrap/segment.h"
#include "core/arena.h"

namespace ckdist {

class WeightArena {
 public:
  // Throws Error(capacity) with both numbers if there is not enough memory. The bytes are reserved (promise_memory)
  // until they are allocated; `written` reports how many are.
  WeightArena(int64_t bytes, bool shared);
  // Maps the arena of another rank, while that rank holds it, or one that was kept since the last start.
  WeightArena(const std::string& path, int64_t bytes);
  ~WeightArena();

  uint8_t* data() const { return data_; }
  // The path for mapping it in other processes of this host. Empty if it is not shared.
  std::string path() const { return segment_ ? segment_->path() : std::string(); }

  // Lies at the end of shared memory, in which packed slices outlive the ranks. Initially zeros.
  struct Kept {
    uint32_t states;   // which of the two copies of the slices' states is in use
    uint32_t damaged;  // not 0: a slice may have been packed from a file that could not be read
  };
  Kept* kept() const { return kept_; }  // null if the arena is private

  void will_write(const uint8_t* at, int64_t bytes);
  // Requests huge pages for all of part `part` of `parts`. For many writing threads this costs less before writing than
  // during it.
  void will_write_part(int part, int parts);
  void written(int64_t bytes);
  // Reserves bytes of a kept arena that will still be packed.
  void promise(int64_t bytes);

 private:
  static int64_t shared_bytes(int64_t bytes);

  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Segment> segment_;  // used instead of arena_ if shared
  uint8_t* data_ = nullptr;
  uint8_t* asked_ = nullptr;  // one byte for each huge page of a segment, at its end; null if no page needs a request
  Kept* kept_ = nullptr;
  int64_t promised_ = 0;
};

}  // namespace ckdist
