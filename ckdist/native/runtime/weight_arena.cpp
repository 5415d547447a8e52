#include "runtime/weight_arena.h"

#include "core/error.h"
#include "core/numa.h"

namespace ckdist {
namespace {

constexpr int64_t kHugePage = Segment::kHugePage;
constexpr int64_t kPage = 4096;
constexpr int64_t kKeptBytes = 64;

WeightArena::Kept* kept_at(uint8_t* data, int64_t whole) {
  return reinterpret_cast<WeightArena::Kept*>(data +
                                              (whole - whole / kHugePage - kKeptBytes) / kKeptBytes * kKeptBytes);
}

}  // namespace

// Rounds up to whole huge pages, with Kept and one byte for each page at the end.
int64_t WeightArena::shared_bytes(int64_t bytes) {
  const int64_t pages = (bytes + kKeptBytes + kHugePage - 1) / kHugePage + 1;
  return (bytes + kKeptBytes + pages + kHugePage - 1) / kHugePage * kHugePage;
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
        // The reserve of huge pages belongs to the machine, not to a node.
        place_pages(segment_->data(), whole, memory_nodes(), false);
        if (!populate_huge(segment_->data(), whole)) segment_.reset();
      } catch (const Error&) {  // another process has taken the huge pages
      }
    }
    if (!segment_) {
      require_memory(whole, "the weights");
      segment_ = std::make_unique<Segment>(whole);
      place_pages(segment_->data(), whole, memory_nodes(), true);
      asked_ = segment_->data() + whole - whole / kHugePage;
    } else {
      bytes = 0;  // the memory is already allocated
    }
    data_ = segment_->data();
    kept_ = kept_at(data_, whole);
  }
  promise_memory(promised_ = bytes);
}

WeightArena::WeightArena(const std::string& path, int64_t bytes) {
  const int64_t whole = shared_bytes(bytes);
  segment_ = std::make_unique<Segment>(path, whole);
  data_ = segment_->data();
  asked_ = data_ + whole - whole / kHugePage;
  kept_ = kept_at(data_, whole);
}

void WeightArena::promise(int64_t bytes) {
  promise_memory(bytes);
  promised_ += bytes;
}

WeightArena::~WeightArena() { promise_memory(-promised_); }

// Best if only one small page of the huge page exists. That page determines the NUMA node. Its index within the huge
// page changes, so that interleaved nodes are used in turn.
void WeightArena::will_write(const uint8_t* at, int64_t bytes) {
  if (!asked_) return;
  for (int64_t i = (at - data_) / kHugePage; i <= (at + bytes - 1 - data_) / kHugePage; ++i) {
    if (__atomic_load_n(asked_ + i, __ATOMIC_RELAXED) || __atomic_exchange_n(asked_ + i, uint8_t{1}, __ATOMIC_RELAXED))
      continue;
    uint8_t* const page = data_ + i * kHugePage;
    __atomic_fetch_or(page + kPage * (i & 7), uint8_t{0},
                      __ATOMIC_RELAXED);  // another thread may already be writing here
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
  const int64_t kept = before < bytes ? before : bytes;  // ranks write to each other's arenas
  if (before < bytes) __atomic_fetch_add(&promised_, bytes - before, __ATOMIC_RELAXED);
  if (kept > 0) promise_memory(-kept);
}

}  // namespace ckdist
