#include "comm/transports/stream_frames.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "comm/transports/transport.h"

namespace ckdist {

namespace {

enum class Data : uint8_t { none, all, share };  // share: only the part of its lane
enum Field : uint8_t { kTag = 1, kMark = 2, kSequence = 4, kOffset = 8 };

struct FrameRule {
  const char* name;
  Data data;
  int64_t most;  // maximum bytes of data; for a frame without data, maximum of `total`
  uint8_t zero;  // Fields that must be 0
};

// Indexed by FrameKind.
constexpr FrameRule kRules[] = {
    {nullptr, Data::none, 0, 0},
    {"message", Data::share, kMaxMessage, kOffset},
    {"part", Data::share, kMaxMessage, 0},
    {"put", Data::all, kMaxMessage, kMark | kSequence},
    {"get", Data::none, kMaxMessage, kMark},
    {"got", Data::all, kMaxMessage, kMark | kOffset},
    {"notify", Data::none, 0, kMark | kSequence},
    {"goodbye", Data::all, kMaxGoodbye, kTag | kMark | kSequence | kOffset},
    {"placed", Data::none, kMaxMessage, 0},
    {"taken", Data::none, 0, kTag | kMark | kOffset},
};

const FrameRule* rule_of(const FrameHeader& h) {
  const size_t kind = size_t(h.kind);
  return h.magic == kFrameMagic && kind >= 1 && kind < std::size(kRules) ? &kRules[kind] : nullptr;
}

}  // namespace

const char* broken_rule(const FrameHeader& h, int lane, int lanes) {
  const FrameRule* const rule = rule_of(h);
  if (!rule) return kNoFrame;
  if (h.pad[0] || h.pad[1]) return "a field that must be 0 is not";
  if (h.offset < 0 || h.bytes < 0 || h.total < 0 || h.total > rule->most) return "a size out of bounds";
  if ((rule->zero & kTag && h.tag) || (rule->zero & kMark && h.mark) || (rule->zero & kSequence && h.sequence) ||
      (rule->zero & kOffset && h.offset))
    return "a field that must be 0 is not";
  if ((h.kind == FrameKind::part) != (lane > 0)) return "on a lane where its kind does not travel";
  const int parts = rule->data == Data::share ? parts_of(h.total, lanes) : 1;
  if (h.parts != parts || lane >= parts) return "another number of parts than its size has";
  switch (rule->data) {
    case Data::none:
      if (h.bytes) return "data where its kind has none";
      break;
    case Data::all:
      if (h.bytes != h.total) return "not all of its bytes";
      break;
    case Data::share:
      const int64_t first = first_of(h.total, lane, parts);
      if (h.offset != first || h.bytes != first_of(h.total, lane + 1, parts) - first)
        return "other bytes than its lane carries";
      break;
  }
  if (h.kind == FrameKind::notify && h.offset >= Transport::kWindowSlots) return "a slot that no window has";
  return nullptr;
}

std::string describe(const FrameHeader& h, int lane) {
  const FrameRule* const rule = rule_of(h);
  char text[200];
  if (!rule) {
    std::snprintf(text, sizeof text, "magic %08x, kind %d, lane %d", h.magic, int(h.kind), lane);
    return text;
  }
  std::snprintf(text, sizeof text, "%s, lane %d, tag %d, sequence %llu, offset %lld, %lld of %lld bytes", rule->name,
                lane, h.tag, (unsigned long long)h.sequence, (long long)h.offset, (long long)h.bytes,
                (long long)h.total);
  return text;
}

}  // namespace ckdist
