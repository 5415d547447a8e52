#include "comm/transports/verbs_frames.h"

#include <iterator>

#include "comm/transports/transport.h"

namespace ckdist {

namespace {

enum Use : uint8_t { kUsesTag = 1, kUsesId = 2, kUsesAnswer = 4, kUsesKey = 8, kUsesAddress = 16 };

struct VerbsRule {
  bool data;            // followed by `bytes` of data
  int64_t least, most;  // range of `bytes`: of its data, or of the data it announces
  uint8_t used;         // Fields that may be nonzero
};

constexpr int64_t kMaxBytes = int64_t(1) << 40;

// Indexed by VerbsKind.
constexpr VerbsRule kVerbsRules[] = {
    {},
    {true, 0, kVerbsEager, kUsesTag | kUsesKey},                                           // message
    {false, kVerbsEager + 1, kMaxBytes, kUsesTag | kUsesId | kUsesKey},                    // offer
    {false, kVerbsEager + 1, kMaxBytes, kUsesId | kUsesAnswer | kUsesKey | kUsesAddress},  // accept
    {false, 0, 0, kUsesId},                                                                // arrived
    {false, 0, kMaxBytes, kUsesTag | kUsesId | kUsesKey | kUsesAddress},                   // window
    {false, 0, 0, kUsesTag | kUsesId},                                                     // notify
    {false, 0, 0, 0},                                                                      // credits
    {true, 0, kVerbsMaxReason, 0},                                                         // goodbye
    {false, 0, 0, 0},                                                                      // leaving
};

}  // namespace

const char* broken_rule(const VerbsFrame& f, uint64_t arrived) {
  if (f.kind < VerbsKind::kMessage || size_t(f.kind) >= std::size(kVerbsRules)) return "no such kind";
  const VerbsRule& rule = kVerbsRules[size_t(f.kind)];
  if (f.bytes < rule.least || f.bytes > rule.most) return "a size out of bounds";
  if (arrived != sizeof f + (rule.data ? uint64_t(f.bytes) : 0)) return "more or less data than it says";
  if ((!(rule.used & kUsesTag) && f.tag) || (!(rule.used & kUsesId) && f.id) ||
      (!(rule.used & kUsesAnswer) && f.answer) || (!(rule.used & kUsesKey) && f.key) ||
      (!(rule.used & kUsesAddress) && f.address))
    return "a field that must be 0 is not";
  if (f.kind == VerbsKind::kNotify && f.id >= uint32_t(Transport::kWindowSlots)) return "a slot that no window has";
  return nullptr;
}

}  // namespace ckdist
