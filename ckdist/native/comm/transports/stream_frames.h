// The frames between two ranks of a StreamTransport: their header, and a table of the rules for each kind.
//
// Rules about a header alone are checked here, before any of the frame's data is stored. Rules that depend on earlier
// frames (windows, announced messages, requests) are checked by the transport.
#pragma once
#include <cstdint>
#include <string>

namespace ckdist {

enum class FrameKind : uint8_t {
  message = 1,  // the first bytes of a message, on lane 0
  part,         // more of a long message: the part of its lane
  put,          // data for a window
  get,          // requests `total` bytes of a window
  got,          // answers a get
  notify,       // adds one to counter `offset` of a window
  goodbye,      // the reason why the sender failed
  placed,       // a message that its receiver reads at `offset` of the sender's memory
  taken,        // the receiver of a placed message has read it
};

struct FrameHeader {
  uint32_t magic;
  FrameKind kind;
  uint8_t parts, pad[2];
  int32_t tag;        // of a message; else the number of the window
  uint32_t mark;      // of a message: identifies its call
  uint64_t sequence;  // number of a message between two ranks, or of a get
  int64_t offset, bytes, total;
};
static_assert(sizeof(FrameHeader) == 48, "the header is a wire format");

constexpr uint32_t kFrameMagic = 0x31446b63;
constexpr int kMaxLanes = 16;
constexpr int64_t kMaxMessage = int64_t(1) << 40;
constexpr int64_t kSplitAt = 512 << 10;  // messages of at least this size use all lanes
constexpr int64_t kMaxGoodbye = 400;

inline int parts_of(int64_t total, int lanes) { return total >= kSplitAt ? lanes : 1; }
// A message of `parts` parts: lane `lane` carries [first_of(total, lane, parts), first_of(total, lane + 1, parts)).
inline int64_t first_of(int64_t total, int lane, int parts) { return total * lane / parts; }

inline constexpr char kNoFrame[] = "no such kind";  // the rule for an unknown magic or kind
// Returns the rule that a header on lane `lane` of `lanes` breaks, or null.
const char* broken_rule(const FrameHeader& header, int lane, int lanes);
// "notify, lane 0, tag 0, sequence 0, offset 3, 5000 of 5000 bytes"
std::string describe(const FrameHeader& header, int lane);

}  // namespace ckdist
