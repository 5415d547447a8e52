// Divides the bytes of one product's weights among the threads of a rank. Each thread has a first piece of its own. The
// rest is divided into smaller pieces, which the next free thread takes.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/range.h"
#include "kernels/linear.h"

namespace ckdist {

constexpr int kSixteen = 16;  // threads; more than these have smaller pieces

class Shares {
 public:
  // Three quarters are divided in advance: long runs of memory are fast for few tokens, and rows in a thread's caches
  // are fast for many tokens. The rest compensates for time that threads lost to other work. For few tokens a piece of
  // kSmallBytes takes microseconds. On many threads a piece is at most an eighth of a thread's share, so that the last
  // one delays the others little, but at least one tile of `tile` bytes. (Up to kSixteen threads small models lost a
  // tenth of their speed by smaller pieces.)
  Shares(int64_t bytes, int64_t tile, int threads, bool few_tokens) : threads_(threads), bytes_(bytes) {
    const int64_t share = bytes / threads;
    first_ = threads == 1 ? bytes : share / 4 * 3;
    const int64_t small = threads > kSixteen ? std::min(kSmallBytes, share / 8) : kSmallBytes;
    rest_ = few_tokens ? std::max(share / 16, small) : share / 8;
    tile = std::max<int64_t>(tile, 1);
    rest_ = std::max<int64_t>(rest_ / tile, 1) * tile;
  }

  int64_t first() const { return first_; }  // bytes of a thread's own piece
  int64_t pieces() const { return threads_ + (bytes_ - first_ * threads_ + rest_ - 1) / rest_; }
  int64_t begin(int64_t piece) const {
    return piece < threads_ ? piece * first_ : std::min(first_ * threads_ + (piece - threads_) * rest_, bytes_);
  }

 private:
  static constexpr int64_t kSmallBytes = 64 << 10;
  int64_t threads_, bytes_, first_, rest_;
};

// Divides a product of many rows of activations among the threads of a rank. Each thread has tiles of its own, for all
// rows. The rest are items of a few tiles by some of the rows, which the next free thread takes. Tiles alone would be
// too few, and a single tile for all rows would read the activations of eight.
class Blocks {
 public:
  // Own tiles are multiples of eight, as kernels take them, if there are enough. `rows_each`: fewest rows of an item;
  // `tiles_each`: most tiles, a multiple of eight.
  Blocks(int64_t bytes, int64_t tile, int threads, int64_t rows, int64_t rows_each, int64_t tiles_each)
      : bytes_(bytes), rows_(rows), parts_(std::max<int64_t>(rows / rows_each, 1)) {
    tile = std::max<int64_t>(tile, 1);
    const int64_t share = bytes / (tile * threads), most = share / 4 * 3;
    const int64_t unit = most < tiles_each ? 8 : tiles_each;
    own_ = threads == 1 ? bytes : (most < 8 ? share / 4 * 2 : most / unit * unit) * tile;
    own_bytes_ = own_ * threads;
    wide_ = std::clamp<int64_t>(share / 4 * 2, 2, tiles_each) * tile;
  }

  int64_t begin(int thread) const { return thread * own_; }
  int64_t end(int thread) const { return (thread + 1) * own_; }
  int64_t items() const { return (bytes_ - own_bytes_ + wide_ - 1) / wide_ * parts_; }
  int64_t item_begin(int64_t item) const { return own_bytes_ + item / parts_ * wide_; }
  int64_t item_end(int64_t item) const { return std::min(item_begin(item) + wide_, bytes_); }
  // Multiples of 32 rows, as kernels take them.
  int64_t first_row(int64_t item) const { return rows_ * (item % parts_) / parts_ / 32 * 32; }
  int64_t end_row(int64_t item) const { return item % parts_ + 1 == parts_ ? rows_ : first_row(item + 1); }

 private:
  int64_t bytes_, rows_, parts_, own_, own_bytes_, wide_;
};

// The tile boundary nearest to byte `at` of a matrix that is divided into pieces of about `piece` bytes. Products read
// two tiles at once, so a piece of several tiles has an even number of them.
inline int64_t boundary(int64_t at, int64_t tile_bytes, int64_t tiles, int64_t piece, int threads) {
  const int64_t several = threads > kSixteen ? 16 : 8;
  if (tile_bytes == 0) return 0;
  const int64_t unit = piece < several * tile_bytes ? 1 : 2, bytes = unit * tile_bytes;
  return std::clamp<int64_t>((at + bytes / 2) / bytes * unit, 0, tiles);
}

// If a matrix has few tiles for this many threads, its columns are divided into parts, whose products are added in
// order. The result has other bits than one sum over all columns, so the parts depend on nothing but the matrix and the
// threads that a rank may have.
inline int column_parts(int64_t tiles, int64_t cols, int threads) {
  constexpr int64_t enough = 8;  // tiles, or parts of them, of each thread
  if (threads <= kSixteen || tiles == 0) return 1;
  const int64_t units = (cols + kColumnPad - 1) / kColumnPad, least = (enough * threads + tiles - 1) / tiles;
  for (int64_t parts = least; parts <= std::min(2 * least, units); parts++)
    if (units % parts == 0) return int(parts);  // equal parts
  return int(std::clamp<int64_t>(units, 1, least));
}

// The columns of one part. Their begin is a multiple of kColumnPad.
inline Range part_columns(int64_t cols, int64_t part, int64_t parts) {
  const int64_t units = (cols + kColumnPad - 1) / kColumnPad;
  return {units * part / parts * kColumnPad, std::min(units * (part + 1) / parts * kColumnPad, cols)};
}

// Number of tiles of a product to compute at a time: about `bytes` bytes, at least `least` tiles, a multiple of 6,
// because kernels take two or three tiles together.
inline int64_t tiles_at_once(int64_t bytes, int64_t tile_bytes, int64_t least) {
  constexpr int64_t together = 6;
  return std::max(bytes / tile_bytes, least) / together * together;
}

// The columns of one thread if threads sum a row of `width` floats together: whole cache lines.
inline Range own_columns(int64_t width, int64_t thread, int threads) {
  constexpr int64_t floats = 16;
  const int64_t lines = (width + floats - 1) / floats;
  return {lines * thread / threads * floats, std::min(lines * (thread + 1) / threads * floats, width)};
}

}  // namespace ckdist
