// The frames between two ranks of a StreamTransport: their header, and a table of the rules for each kind.
//
// Rules about a header alone are checked here, before any of the frame's data is stored. Rules that depend on earlier
// frames (windows, announced messages, requests) are checked by the transport.
#pragma once
#include <cstdint>
#include <string>

namespace ckdist {

enum class FrameKind : uint8_t {
  message = 1,
  put,      // data for a window
  get,      // requests `total` bytes of a window
  got,      // answers a get
  notify,   // adds one to counter `offset` of a window
  goodbye,  // the reason why the sender failed
  placed,   // a message that its receiver reads at `offset` of the sender's memory
  taken,    // the receiver of a placed message has read it
};

struct FrameHeader {
  uint32_t magic;
  FrameKind kind;
  uint8_t pad[3];
  int32_t tag;        // of a message; else the number of the window
  uint32_t mark;      // of a message: identifies its call
  uint64_t sequence;  // number of a message between two ranks, or of a get
  int64_t offset, bytes, total;
};
static_assert(sizeof(FrameHeader) == 48, "the header is a wire format");

constexpr uint32_t kFrameMagic = 0x31446b63;
constexpr int64_t kMaxMessage = int64_t(1) << 40;
constexpr int64_t kMaxGoodbye = 400;

inline constexpr char kNoFrame[] = "no such kind";  // the rule for an unknown magic or kind
// Returns the rule that a header breaks, or null.
const char* broken_rule(const FrameHeader& header);
// "notify, tag 0, sequence 0, offset 3, 5000 of 5000 bytes"
std::string describe(const FrameHeader& header);

}  // namespace ckdist
