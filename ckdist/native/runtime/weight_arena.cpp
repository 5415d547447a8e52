#include "runtime/weight_arena.h"

#include "core/error.h"
#include "core/numa.h"

namespace ckdist {
namespace {

constexpr int64_t kHugePage = Segment::kHugePage;
constexpr int64_t kPage = 4096;

}  // namespace

// Whole huge pages, with a byte for each.
int64_t WeightArena::shared_bytes(int64_t bytes) {
  const int64_t pages = (bytes + kHugePage - 1) / kHugePage + 1;
  return (bytes + pages + kHugePage - 1) / kHugePage * kHugePage;
}

WeightArena::WeightArena(int64_t bytes, bool shared) {
  if (!shared) {
    arena_ = std::make_unique<Arena>(bytes, "the weights");
    data_ = arena_->data();
  } else {
    const int64_t whole = shared_bytes(bytes);
    if (unclaimed_huge_bytes() >= whole) {
      try {
        segment_ = std::make_unique<Segment>(whole, true);
        place_pages(segment_->data(), whole, memory_nodes(), false);  // the reserve is the machine's, not a node's
        if (!populate_huge(segment_->data(), whole)) segment_.reset();
      } catch (const Error&) {  // somebody else was faster
      }
    }
    if (!segment_) {
      require_memory(whole, "the weights");
      segment_ = std::make_unique<Segment>(whole);
      place_pages(segment_->data(), whole, memory_nodes(), true);
      asked_ = segment_->data() + whole - whole / kHugePage;
    } else {
      bytes = 0;  // they are there
    }
    data_ = segment_->data();
  }
  promise_memory(promised_ = bytes);
}

WeightArena::WeightArena(const std::string& path, int64_t bytes) {
  const int64_t whole = shared_bytes(bytes);
  segment_ = std::make_unique<Segment>(path, whole);
  data_ = segment_->data();
  asked_ = data_ + whole - whole / kHugePage;
}

WeightArena::~WeightArena() { promise_memory(-promised_); }

// Best while all but one page of a huge one are still missing. That page says on which node; its place within the huge
// one changes, so that interleaved nodes take turns.
void WeightArena::will_write(const uint8_t* at, int64_t bytes) {
  if (!asked_) return;
  for (int64_t i = (at - data_) / kHugePage; i <= (at + bytes - 1 - data_) / kHugePage; ++i) {
    if (__atomic_load_n(asked_ + i, __ATOMIC_RELAXED) || __atomic_exchange_n(asked_ + i, uint8_t{1}, __ATOMIC_RELAXED))
      continue;
    uint8_t* const page = data_ + i * kHugePage;
    __atomic_fetch_or(page + kPage * (i & 7), uint8_t{0},
                      __ATOMIC_RELAXED);  // another thread may be writing there already
    Segment::collapse(page, kHugePage);
  }
}

void WeightArena::will_write_part(int part, int parts) {
  const int64_t pages = asked_ ? segment_->size() / kHugePage : 0;
  for (int64_t i = pages * part / parts; i < pages * (part + 1) / parts; ++i)
    will_write(data_ + i * kHugePage, kHugePage);
}

void WeightArena::written(int64_t bytes) {
  const int64_t before = __atomic_fetch_sub(&promised_, bytes, __ATOMIC_RELAXED);
  const int64_t kept = before < bytes ? before : bytes;  // other ranks write here too, and this one in theirs
  if (before < bytes) __atomic_fetch_add(&promised_, bytes - before, __ATOMIC_RELAXED);
  if (kept > 0) promise_memory(-kept);
}

}  // namespace ckdist
