// One queue pair of a reliable connection: set-up, and posting with selective signalling.
//
// Every posted request has a number. A completion of number n means that all requests up to n are complete. A request
// is signalled only if its end is waited for; in addition one in every quarter of the queue is, to free its entries.
#pragma once
#include "comm/transports/verbs_device.h"

#if CKDIST_HAVE_VERBS
namespace ckdist {

struct VerbsRemote {
  uint64_t address;
  uint32_t key;
};

class VerbsQueuePair {
 public:
  VerbsQueuePair(VerbsDevice& device, uint32_t peer, int depth, int receives);
  ~VerbsQueuePair();
  VerbsQueuePair(const VerbsQueuePair&) = delete;
  VerbsQueuePair& operator=(const VerbsQueuePair&) = delete;

  uint32_t number() const { return pair_->qp_num; }
  uint32_t sequence() const { return sequence_; }  // number of its first packet
  bool is(const ibv_qp* pair) const { return pair == pair_; }
  int64_t inline_bytes() const { return inline_; }

  // ack_exponent: a packet without an acknowledgement is resent after 4.096 us * 2^ack_exponent, six times.
  void connect(const VerbsHost& host, const VerbsPair& pair, int ack_exponent);
  void stop();  // ends all requests in flight; their memory is not used afterwards

  void post_receive();

  bool room() const { return posted_ - completed_ < uint64_t(depth_); }
  // Posts one request and returns its number. `key` of local memory is ignored if the data is short enough to be
  // inlined.
  uint64_t write(const void* data, uint32_t bytes, uint32_t key, VerbsRemote to, bool signal);
  uint64_t write_frame(const void* data, uint32_t bytes, uint32_t key, VerbsRemote to, uint32_t slot);
  uint64_t read(void* data, uint32_t bytes, uint32_t key, VerbsRemote from);
  void completed(uint64_t number) { completed_ = number; }
  uint64_t completed() const { return completed_; }
  bool quiet() const { return posted_ == completed_; }

  // wr_id of every request: the peer and the number.
  static uint32_t peer_of(uint64_t id) { return uint32_t(id >> 48); }
  static uint64_t number_of(uint64_t id) { return id & ((uint64_t(1) << 48) - 1); }

 private:
  uint64_t post(ibv_send_wr& request, const void* data, uint32_t bytes, uint32_t key, VerbsRemote at, bool signal);
  void modify(ibv_qp_attr& attributes, int mask, const char* state);

  const VerbsLibrary& verbs_;
  VerbsDevice& device_;
  ibv_qp* pair_;
  const uint64_t peer_;
  const int depth_;
  int64_t inline_ = 0;
  uint32_t sequence_;
  uint64_t posted_ = 0, completed_ = 0, signalled_ = 0;
};

}  // namespace ckdist
#endif
