// What two ranks tell each other over RDMA: the facts that connect a queue pair, and the frames that travel through it.
//
// Every rank keeps a ring of `slots` slots for every peer. A frame is one RDMA WRITE WITH IMMEDIATE into the peer's
// next slot, in order; the immediate value is the slot's number. The receiver has posted one receive per slot, and
// posts it anew before it returns the slot by adding one to `credits` of a later frame, so no frame ever meets a
// receiver that is not ready. The last credit is kept for a frame of kind kCredits, which therefore always gets
// through. One table (verbs_frames.cpp) says for each kind what may come.
//
// Short messages lie in the slot behind their frame. Long ones are offered, accepted with the address of the posted
// receive, written there, and announced by a frame that follows on the same queue pair. All numbers are little-endian.
#pragma once
#include <cstdint>

namespace ckdist {

enum class VerbsKind : uint32_t {
  kMessage = 1,  // tag, bytes; key: the call that it belongs to, or 0; the message follows
  kOffer,        // tag, bytes, key as above; id: of the sender's request
  kAccept,       // id: the offer's; answer: of the receiver's request; address, key, bytes
  kArrived,      // id: the answer of the accept
  kWindow,       // tag: window; id: how often it was exposed; address, key, bytes
  kNotify,       // tag: window; id: slot
  kCredits,
  kGoodbye,  // bytes; the reason follows
  kLeaving,  // it is done: nothing follows, and nothing more needs to come
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
constexpr int64_t kVerbsEager =
    kVerbsSlotBytes - sizeof(VerbsFrame);  // bytes of the longest message that travels in its slot

constexpr int64_t kVerbsMaxReason = 400;  // bytes of a goodbye

// Null, or the rule that a frame breaks of which `arrived` bytes came, its header included.
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
  uint64_t ring;  // where the peer's frames go
  uint32_t ring_key, queue_pair, sequence, zero;
};
static_assert(sizeof(VerbsPair) == 24, "the address is a wire format");

}  // namespace ckdist
