// The wire format between two ranks over RDMA: the addresses for connecting a queue pair, and the frames.
//
// Every rank keeps a ring of `slots` slots for every peer. A frame is one RDMA WRITE WITH IMMEDIATE into the peer's
// next slot, in order; the immediate value is the slot's number. The receiver has posted one receive per slot. It posts
// the receive again before it returns the slot by adding 1 to `credits` of a later frame. So a receive is always posted
// when a frame arrives. The last credit is reserved for a frame of kind kCredits, so that it can always be sent. A
// table (verbs_frames.cpp) has the rules for each kind.
//
// Short messages follow their frame in the slot. Long messages are offered, accepted with the address of the posted
// receive, written there, and announced by a frame on the same queue pair. All numbers are little-endian.
#pragma once
#include <cstdint>

namespace ckdist {

enum class VerbsKind : uint32_t {
  kMessage = 1,  // tag, bytes; key: its call, or 0; followed by the message
  kOffer,        // tag, bytes, key as above; id of the sender's request
  kAccept,       // id of the offer; answer: id of the receiver's request; address, key, bytes
  kArrived,      // id: the answer of the accept
  kWindow,       // tag: window; id: number of its exposures; address, key, bytes
  kNotify,       // tag: window; id: slot
  kCredits,
  kGoodbye,  // bytes; followed by the reason
  kLeaving,  // the sender has finished: nothing follows, and it needs nothing more
};

struct VerbsFrame {
  VerbsKind kind;
  uint32_t credits;
  int32_t tag;
  uint32_t id, answer;
  uint32_t key;
  uint64_t address;
  int64_t bytes;
};
static_assert(sizeof(VerbsFrame) == 40, "the frame is a wire format");

constexpr uint32_t kVerbsSlotBytes = 8192;
constexpr int64_t kVerbsEager = kVerbsSlotBytes - sizeof(VerbsFrame);  // maximum bytes of a message in a slot

constexpr int64_t kVerbsMaxReason = 400;  // maximum bytes of a goodbye

// Returns the rule that a frame breaks, or null. `arrived`: received bytes, including the header.
const char* broken_rule(const VerbsFrame& frame, uint64_t arrived);

// A rank's address: one VerbsHost, then one VerbsPair per rank of the world (its own is unused).
struct VerbsHost {
  char magic[8];  // "ckverbs1"
  uint32_t slots, slot_bytes;
  uint16_t lid;
  uint8_t mtu;  // enum ibv_mtu
  uint8_t ethernet;
  uint32_t reads;  // RDMA READs that it answers at a time
  uint8_t gid[16];
};
static_assert(sizeof(VerbsHost) == 40, "the address is a wire format");

struct VerbsPair {
  uint64_t ring;  // destination of the peer's frames
  uint32_t ring_key, queue_pair, sequence, zero;
};
static_assert(sizeof(VerbsPair) == 24, "the address is a wire format");

}  // namespace ckdist
