#include "comm/transports/stream_frames.h"

#include <cstdio>
#include <iterator>

#include "comm/transports/transport.h"

namespace ckdist {

namespace {

enum Field : uint8_t { kTag = 1, kMark = 2, kSequence = 4, kOffset = 8 };

struct FrameRule {
  const char* name;
  bool data;     // followed by `total` bytes of data
  int64_t most;  // maximum of `total`
  uint8_t zero;  // Fields that must be 0
};

// Indexed by FrameKind.
constexpr FrameRule kRules[] = {
    {nullptr, false, 0, 0},
    {"message", true, kMaxMessage, kOffset},
    {"put", true, kMaxMessage, kMark | kSequence},
    {"get", false, kMaxMessage, kMark},
    {"got", true, kMaxMessage, kMark | kOffset},
    {"notify", false, 0, kMark | kSequence},
    {"goodbye", true, kMaxGoodbye, kTag | kMark | kSequence | kOffset},
    {"placed", false, kMaxMessage, 0},
    {"taken", false, 0, kTag | kMark | kOffset},
};

const FrameRule* rule_of(const FrameHeader& h) {
  const size_t kind = size_t(h.kind);
  return h.magic == kFrameMagic && kind >= 1 && kind < std::size(kRules) ? &kRules[kind] : nullptr;
}

}  // namespace

const char* broken_rule(const FrameHeader& h) {
  const FrameRule* const rule = rule_of(h);
  if (!rule) return kNoFrame;
  if (h.pad[0] || h.pad[1] || h.pad[2]) return "a field that must be 0 is not";
  if (h.offset < 0 || h.bytes < 0 || h.total < 0 || h.total > rule->most) return "a size out of bounds";
  if ((rule->zero & kTag && h.tag) || (rule->zero & kMark && h.mark) || (rule->zero & kSequence && h.sequence) ||
      (rule->zero & kOffset && h.offset))
    return "a field that must be 0 is not";
  if (!rule->data && h.bytes) return "data where its kind has none";
  if (rule->data && h.bytes != h.total) return "not all of its bytes";
  if (h.kind == FrameKind::notify && h.offset >= Transport::kWindowSlots) return "a slot that no window has";
  return nullptr;
}

std::string describe(const FrameHeader& h) {
  const FrameRule* const rule = rule_of(h);
  char text[200];
  if (!rule) {
    std::snprintf(text, sizeof text, "magic %08x, kind %d", h.magic, int(h.kind));
    return text;
  }
  std::snprintf(text, sizeof text, "%s, tag %d, sequence %llu, offset %lld, %lld of %lld bytes", rule->name, h.tag,
                (unsigned long long)h.sequence, (long long)h.offset, (long long)h.bytes, (long long)h.total);
  return text;
}

}  // namespace ckdist
