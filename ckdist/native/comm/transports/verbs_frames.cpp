#include "comm/transports/verbs_frames.h"

#include <iterator>

#include "comm/transports/transport.h"

namespace ckdist {

namespace {

enum Field : uint8_t { kTag = 1, kId = 2, kAnswer = 4, kKey = 8, kAddress = 16 };

struct FrameRule {
  bool data;            // followed by `bytes` of data
  int64_t least, most;  // range of `bytes`: of its data, or of the data it announces
  uint8_t used;         // Fields that may be nonzero
};

constexpr int64_t kMaxBytes = int64_t(1) << 40;

// Indexed by VerbsKind.
constexpr FrameRule kRules[] = {
    {},
    {true, 0, kVerbsEager, kTag | kKey},                                   // message
    {false, kVerbsEager + 1, kMaxBytes, kTag | kId | kKey},                // offer
    {false, kVerbsEager + 1, kMaxBytes, kId | kAnswer | kKey | kAddress},  // accept
    {false, 0, 0, kId},                                                    // arrived
    {false, 0, kMaxBytes, kTag | kId | kKey | kAddress},                   // window
    {false, 0, 0, kTag | kId},                                             // notify
    {false, 0, 0, 0},                                                      // credits
    {true, 0, kVerbsMaxReason, 0},                                         // goodbye
    {false, 0, 0, 0},                                                      // leaving
};

}  // namespace

const char* broken_rule(const VerbsFrame& f, uint64_t arrived) {
  if (f.kind < VerbsKind::kMessage || size_t(f.kind) >= std::size(kRules)) return "no such kind";
  const FrameRule& rule = kRules[size_t(f.kind)];
  if (f.bytes < rule.least || f.bytes > rule.most) return "a size out of bounds";
  if (arrived != sizeof f + (rule.data ? uint64_t(f.bytes) : 0)) return "more or less data than it says";
  if ((!(rule.used & kTag) && f.tag) || (!(rule.used & kId) && f.id) || (!(rule.used & kAnswer) && f.answer) ||
      (!(rule.used & kKey) && f.key) || (!(rule.used & kAddress) && f.address))
    return "a field that must be 0 is not";
  if (f.kind == VerbsKind::kNotify && f.id >= uint32_t(Transport::kWindowSlots)) return "a slot that no window has";
  return nullptr;
}

}  // namespace ckdist
