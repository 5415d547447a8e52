// Ranks of several hosts: shared memory inside each host, and between hosts messages over any Transport.
//
// A partial value is summed inside each host first, and hosts exchange their sums (comm/order.h): small values through
// one rank of each host, large ones through every rank with its twins on the other hosts, each for its own slice. With
// few hosts or small values every host has every other's sum, and the reader adds them; large values of three and more
// hosts are summed slice by slice, which moves less. Sums land in memory that all ranks of a host read in place. A host
// may have a single rank: where nothing is shared, every rank is a host.
//
// Every rank shows the others that it lives, and for whom it waits (comm/pulse.h), so the rank that is named is the one
// that is lost.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/channel.h"
#include "comm/group.h"
#include "comm/host_ranks.h"
#include "comm/order.h"
#include "comm/pulse.h"

namespace ckdist {

constexpr int64_t kFrameInts = 256;  // a message's first frame: its length, then the message or its beginning

enum WireTag : int { kTagFrame = 8, kTagBody, kTagShare, kTagSum, kTagSlice, kTagTotal, kTagLogits };

class WireGroup : public Group {
 public:
  struct Settings {
    std::shared_ptr<Wire> wire;  // used by this group alone
    int rank;
    std::vector<int> host_of;  // by rank: any numbers, equal for ranks that share memory
    int64_t direct_bytes;      // of three and more hosts: up to so many bytes a sum goes whole to every host
    int64_t leaders_bytes;     // up to so many, one rank of each host speaks for it
    int spins;
    double timeout_s;
  };
  // `path`: of HostRanks, among the ranks of this host.
  WireGroup(const std::string& path, Settings settings);
  ~WireGroup() override;
  const std::string& path() const { return local_.path(); }

  void reserve(const GroupSizes& sizes) override;
  void publish(const int32_t* message, int64_t ints) override;
  const int32_t* receive(int64_t* ints) override;
  float* partial(int slot) override { return part(slot, index_); }
  void reduce(int slot, int64_t floats, int step, Idle idle) override { sum_hosts(slot, floats, step, idle, false); }
  int parts(int slot, const float** out) override;
  void peers(int slot, const float** out) override;
  void exchange(int step, Idle idle) override;
  float* host_partial(int slot, int64_t floats) override;
  void reduce_hosts(int slot, int64_t floats, int step, Idle idle) override {
    sum_hosts(slot, floats, step, idle, true);
  }
  float* logits(int64_t* stride) override;
  void gather(int64_t rows, int step) override;
  const float* gathered() override { return logits_; }
  void check_peers() override;
  void abandon(const char* reason) override;
  void leave() override;

 private:
  static constexpr int64_t kRowsAtOnce = 64;  // rows of logits under way from each rank

  WireGroup(const std::string& path, Settings& settings, Order order);

  struct Share {
    int64_t first, columns;
  };  // of the logits
  struct Pending {
    Transport::Request request;
    int peer;
  };

  int leader(int host) const { return order_.hosts()[host][0]; }
  float* part(int slot, int index) const { return part_[slot] + index * padded_; }
  float* sum(int slot, int host) const;  // a host's sum, where this host's ranks read it
  template <class Call>
  auto over_wire(Call&& call) -> decltype(call());  // in its turn at the wire; its errors say at which step
  void send(int peer, int tag, const void* data, int64_t bytes);
  void receive(int peer, int tag, void* data, int64_t bytes);
  void wait();
  void wait_for_message();
  void idle(int64_t ns);
  void check_pulse();  // throws when a rank is lost
  [[noreturn]] void give_up(size_t first);
  bool large(int64_t floats) const {
    return hosts_ > 2 && floats * 4 > direct_bytes_;
  }  // too large to go whole to every host
  // `folded`: this host's part stands at host_partial() already.
  void sum_hosts(int slot, int64_t floats, int step, Idle idle, bool folded);
  void fold_own(int slot, int64_t begin, int64_t end, float* out);
  void add_sums(int slot, int64_t begin, int64_t end, bool folded);

  const Order order_;
  const int host_, index_;  // of this rank: its host, and its place there
  const int hosts_;
  int owners_;  // ranks of each host that carry a large value
  const int64_t direct_bytes_, leaders_bytes_;
  const int64_t spin_ns_, timeout_ns_, grace_ns_;
  std::shared_ptr<Wire> wire_;
  Pulse pulse_;
  HostRanks local_;
  Transport& transport_;
  std::vector<Pending> pending_, later_;
  int step_ = kStart;

  GroupSizes sizes_{};
  int64_t padded_ = 0, kept_floats_ = 0, slice_floats_ = 0;
  float* known_ = nullptr;    // what the wire was told of
  float* part_[kSlots] = {};  // (ranks of this host, padded_)
  float* sums_[kSlots] = {};  // (hosts, kept_floats_): the hosts' sums, this host's own only where it has several ranks
  float* total_[kSlots] = {};  // the whole value, of a large one of three and more hosts
  float* folded_ = nullptr;    // this host's sum of such a value
  float* slices_ = nullptr;    // (hosts, slice_floats_): this rank's slice of the hosts' sums
  bool whole_[kSlots] = {};    // the value is in total_
  float* logits_ = nullptr;    // (rows, vocab): on rank 0's host everything, elsewhere the ranks' own columns
  std::vector<Share> shares_;  // rank 0: of every rank
  int32_t frame_[kFrameInts];  // the first part of a message
  std::vector<int32_t> received_;
};

}  // namespace ckdist
