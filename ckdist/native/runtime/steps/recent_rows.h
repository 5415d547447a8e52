// The last rows of each sequence that later tokens can read, as rings in the slots of states.
//
// The rows of a chunk are in the step's values. They enter the ring at its end.
#pragma once
#include "runtime/inference.h"

namespace ckdist {

struct RecentRows {
  Inference& r;
  const StateSlots::Layer& layer;
  int64_t offset, count, width;  // floats before the ring in a slot; rows; floats of a row

  RecentRows(Inference& r, int number, ckdist_array name) : r(r), layer(r.states.layers[number]) {
    const CacheArrays arrays(r.program.layers[number]);
    offset = arrays.ring_offset(name), count = arrays.at(name).rows, width = arrays.at(name).width;
  }

  // The row of a position before the chunk of a sequence.
  const float* before(int sequence, int64_t position) const { return at(r.batch.states[sequence].in, position); }

  // Writes this thread's part of the rows after each chunk. write(token of the batch, to) copies a row of a chunk. No
  // thread may read a ring any more, unless all chunks are single tokens: the row that these replace is not read.
  template <class Write>
  void keep(int thread, Write&& write) const {
    for (int64_t s = 0; s < r.batch.sequences; s++) {
      const BatchView::Chunk& chunk = r.batch.chunks[s];
      const ckdist_state_slots& slots = r.batch.states[s];
      const int64_t first = chunk.first_position, end = first + chunk.tokens, token = r.starts[size_t(s)].token;
      const auto copy = [&](int64_t position, int32_t slot) {
        float* const to = at(slot, position);
        if (position >= first) write(token + position - first, to);
        else std::copy_n(at(slots.in, position), width, to);
      };
      const bool all = slots.in != slots.out || slots.save >= 0;
      const int64_t begin = std::max(all ? 0 : first, end - count);
      const Range own = r.part_of(thread, end - begin);
      for (int64_t p = begin + own.begin; p < begin + own.end; p++) {
        // the saved row in the same place of the ring
        const int64_t last = slots.save_position - 1, saved = last - ((last - p) % count + count) % count;
        if (slots.save >= 0 && saved >= 0) copy(saved, slots.save);
        if (p >= first || slots.in != slots.out) copy(p, slots.out);
      }
    }
  }

 private:
  float* at(int64_t slot, int64_t position) const { return layer.slot(slot) + offset + position % count * width; }
};

}  // namespace ckdist
