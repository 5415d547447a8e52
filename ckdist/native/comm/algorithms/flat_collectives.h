// Collectives over messages only: all pairs of ranks communicate through a channel, on any hosts.
//
// Small reductions gather all values on all ranks (directly, or by recursive doubling for many ranks) and fold them
// everywhere. Large reductions send every rank the slices that it owns, fold them there, and gather the results.
#pragma once
#include <memory>

#include "comm/algorithms/collectives.h"
#include "comm/algorithms/order.h"
#include "comm/channel.h"

namespace ckdist {

class FlatCollectives : public Collectives {
 public:
  FlatCollectives(std::shared_ptr<Channel> channel, const Order& order, const Thresholds& thresholds);

  void all_reduce(const void* in, void* out, int64_t elements, Element e, ReduceOp op) override;
  void reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) override;
  void all_gather(const void* in, void* out, const int64_t* bytes) override;
  void all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) override;
  void broadcast(void* data, int64_t bytes, int root) override;
  void barrier() override;

 protected:
  // Starts a call: names it for errors and marks its messages.
  CallName begin(const char* name, uint64_t signature);

  std::shared_ptr<Channel> channel_;
  const Order order_;
  const Thresholds thresholds_;
  std::vector<Channel::Pending> pending_;
  // Buffers. They grow to the size of the largest call.
  std::vector<uint8_t> scratch_, held_;
  std::vector<const void*> parts_;

 private:
  template <class To, class From>
  void start(const To& to, const From& from);
  void gather_doubling(uint8_t* blocks, int64_t bytes, const CallName& call);

  uint64_t calls_ = 0;
};

}  // namespace ckdist
