// A file of slots of equal size that keeps blocks of a cache, and a file of their headers.
//
// A header is written after its data and has a checksum of both, so a torn or damaged slot is noticed when it is read.
#pragma once
#include <cstdint>
#include <vector>

#include "api/commands_api.h"

namespace ckdist {

class Slab {
 public:
  // The files stay the caller's. `bytes`: data of one slot.
  Slab(int headers_file, int data_file, int64_t bytes, int64_t slots);

  int64_t slots() const { return slots_; }
  // Data of one slot, to fill before `write` and to read after `read`.
  uint8_t* data() { return data_.data(); }
  // These return 0 or an errno. EBADMSG: the slot is damaged or holds another entry.
  int write(int64_t slot, const ckdist_slab_entry& entry);
  int read(int64_t slot, const ckdist_slab_entry& entry);
  // Asks the system to read a slot soon.
  void read_ahead(int64_t slot) const;

  static int64_t stride(int64_t bytes);
  static bool is_sound(const ckdist_slab_header& header, const uint8_t* data, int64_t bytes);

 private:
  const int headers_file_, data_file_;
  const int64_t slots_;
  std::vector<uint8_t> data_;
};

}  // namespace ckdist
