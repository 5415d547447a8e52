// The rules of RDMA frames: for each rule a frame that breaks it.
#include <cstring>

#include <doctest/doctest.h>

#include "comm/transports/transport.h"
#include "comm/transports/verbs_frames.h"

using namespace ckdist;

namespace {

VerbsFrame frame(VerbsKind kind, int64_t bytes = 0) {
  VerbsFrame f{};
  f.kind = kind;
  f.bytes = bytes;
  return f;
}

bool refused(const VerbsFrame& f, uint64_t data, const char* rule) {
  const char* const broken = broken_rule(f, sizeof f + data);
  return broken && std::strcmp(broken, rule) == 0;
}

}  // namespace

TEST_CASE("a frame of verbs has the size, the data and the fields of its kind") {
  CHECK(!broken_rule(frame(VerbsKind::kMessage, 100), sizeof(VerbsFrame) + 100));
  CHECK(!broken_rule(frame(VerbsKind::kMessage, kVerbsEager), kVerbsSlotBytes));
  CHECK(!broken_rule(frame(VerbsKind::kOffer, kVerbsEager + 1), sizeof(VerbsFrame)));
  CHECK(!broken_rule(frame(VerbsKind::kCredits), sizeof(VerbsFrame)));

  const char* const size = "a size out of bounds";
  CHECK(
      refused(frame(VerbsKind::kMessage, kVerbsEager + 1), kVerbsEager + 1, size));  // it would be read beyond its slot
  CHECK(refused(frame(VerbsKind::kMessage, -1), 0, size));
  CHECK(refused(frame(VerbsKind::kOffer, kVerbsEager), 0, size));
  CHECK(refused(frame(VerbsKind::kOffer, (int64_t(1) << 40) + 1), 0, size));
  CHECK(refused(frame(VerbsKind::kNotify, 8), 0, size));
  CHECK(refused(frame(VerbsKind::kGoodbye, 401), 401, size));
  CHECK(refused(frame(VerbsKind::kMessage, 100), 99, "more or less data than it says"));
  CHECK(refused(frame(VerbsKind::kOffer, 10000), 8, "more or less data than it says"));
  CHECK(refused(frame(VerbsKind(0)), 0, "no such kind"));
  CHECK(refused(frame(VerbsKind(10)), 0, "no such kind"));

  VerbsFrame notify = frame(VerbsKind::kNotify);
  notify.id = uint32_t(Transport::kWindowSlots);
  CHECK(refused(notify, 0, "a slot that no window has"));
  VerbsFrame credits = frame(VerbsKind::kCredits);
  credits.address = 1;
  CHECK(refused(credits, 0, "a field that must be 0 is not"));
}
