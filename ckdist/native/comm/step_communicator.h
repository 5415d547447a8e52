// The replay's view of a communicator: batches from rank 0, sums of partial values, logits at rank 0, messages between
// ranks.
//
// Communicator::steps makes it, once. Afterwards nothing is allocated here, and all buffers are registered with the
// transport. One thread of a rank calls it at a time, and no collective of the communicator runs meanwhile. A step
// begins with a batch and ends with gather_logits. Sums run in float32 in the order of comm/algorithms/order.h.
//
// Inside a host, ranks write partial values where all of them can read: an all_reduce is one barrier, and readers add
// the summands in place. Each rank's buffers are touched first by their owner, so their pages lie on its node.
//
// Between hosts, each host's sum is exchanged: small values through one rank of each host (the leader), large ones
// through every rank with its peers of the same local rank, each for its own slice. With few hosts or small values
// every host keeps every other's sum, and readers add them. Large values of three and more hosts are summed slice by
// slice, which moves less. Where nothing is shared, every rank is a host.
#pragma once
#include <memory>
#include <vector>

#include "comm/algorithms/collectives.h"
#include "comm/algorithms/order.h"
#include "comm/bootstrap/segment.h"
#include "comm/bootstrap/shm_rendezvous.h"
#include "comm/channel.h"

namespace ckdist {

constexpr int kSlots = 2;  // of partial values; they alternate: a slot is written again after everyone passed the next

struct StepSizes {
  int64_t partial_floats;           // of one partial value, at most
  int64_t logit_rows, vocab;        // of the gathered logits, at most
  int64_t first_column, columns;    // of the logits that this rank computes
  int64_t batch_ints;               // of one batch, at most
  int64_t counters = 0;             // of each rank
  int64_t rows = 0, row_bytes = 0;  // that hosts share out and whose ranks pass on to each other, at most
  int64_t batches = 1;              // that are published before a rank has received the first of them, at most
};

class StepCommunicator {
 public:
  struct Columns {
    int64_t first, count;
  };
  struct Parts {
    Order order;
    int rank;
    std::shared_ptr<ShmRendezvous> rendezvous;  // of this host's ranks; null: nothing is shared
    std::unique_ptr<Channel> channel;           // of these messages alone
    Collectives* collectives;
    Thresholds thresholds;
    std::vector<Columns> columns;  // of the logits, by rank
  };
  // Bytes that the ranks of this host share.
  static int64_t memory_bytes(const Order& order, int rank, const Thresholds& thresholds, const StepSizes& sizes);
  // `memory`: so many zeros, of which no page was touched. A collective call.
  StepCommunicator(Parts parts, Segment memory, const StepSizes& sizes);
  ~StepCommunicator();

  const int rank, size;
  const int local_rank, local_size;  // among the ranks that share memory with this one

  // Rank 0 gives every other rank one batch; the others wait for it without burning a core, and have it until they
  // receive the next. Batches may follow one another at once; who publishes more than the ranks have room for waits.
  // An empty batch is the last one.
  // While a rank waits it sees off `outgoing` messages, which may need it to go on.
  void publish(const int32_t* batch, int64_t ints);
  const int32_t* receive(int64_t* ints, std::vector<Channel::Pending>* outgoing = nullptr);

  // `step` names the place in errors; `idle` is called between polls.

  // Where this rank writes its part of the value in `slot`.
  float* partial(int slot) { return part(slot, local_rank); }
  // Returns when summands(slot) may be read.
  void all_reduce(int slot, int64_t floats, int step, Idle idle = {});
  // The summands of the value in `slot`, in their order, and their number; added from first to last they are the value.
  int summands(int slot, const float** out) const;

  // The values in `slot` of the ranks that share memory, by local rank, and what returns when they may be read.
  void peers(int slot, const float** out) const;
  void all_gather(int step, Idle idle = {}) { meet(step, grace_ns_, idle); }

  // A value that is partial over hosts alone: where a host's ranks together write theirs, and what returns when
  // summands(slot) may be read.
  float* host_partial(int slot, int64_t floats);
  void all_reduce_hosts(int slot, int64_t floats, int step, Idle idle = {});

  // Where this rank writes its columns of the logits, and the floats from row to row.
  float* logits(int64_t* stride);
  // Returns when rank 0 may read all columns at gathered(), as (rows, vocab), until it publishes again.
  void gather_logits(int64_t rows, int step);
  const float* gathered() const { return logits_; }

  // Messages between two ranks arrive in the order they were sent, and have the size that is awaited. Memory of
  // Communicator::allocate is read in place on the same host, and by RDMA.
  Channel::Pending isend(int peer, const void* data, int64_t bytes);
  Channel::Pending irecv(int peer, void* data, int64_t bytes);
  void wait(Channel::Pending& message, int step);
  bool test(Channel::Pending& message) { return parts_.channel->test(message); }
  void send(int peer, const void* data, int64_t bytes, int step);
  void recv(int peer, void* data, int64_t bytes, int step);
  // This rank is alive and has made a step: who waits for it goes on waiting.
  void count_step();

  // The hosts, in the order in which their values are added: this rank's, how many there are, and which rank of another
  // has this one's place. fold_hosts: `out` = the sum of a part of each.
  int host() const { return host_; }
  int host_count() const { return host_count_; }
  int same_place(int host) const { return hosts()[host][local_rank]; }
  void fold_hosts(float* out, const float* const* parts, int64_t floats) const;
  // out: of floats from `begin` on of the value in `slot` what this host's ranks bring to it.
  void fold_local(int slot, int64_t begin, int64_t end, float* out) const;
  // Where a rank of this host leaves rows for the others; two halves, which alternate.
  uint8_t* rows(int half, int local_rank) const { return rows_ + (half * local_size + local_rank) * rows_bytes_; }
  // Zeros at first, for what the ranks of this host count: read between batches, written in them by their own rank.
  int64_t* counters(int local_rank) const { return counters_ + local_rank * sizes_.counters; }
  // Bytes that this rank has sent to other hosts.
  int64_t sent() const { return sent_; }

  // Memory that many messages will lie in, as Transport says.
  bool register_memory(void* base, int64_t bytes) { return parts_.channel->register_memory(base, bytes); }
  void forget_memory(void* base) { parts_.channel->forget_memory(base); }

  // On any buffers, over all ranks: all_gather, reduce_scatter, all_to_all, barrier. Nothing is allocated once a call
  // of the size was made, where `in` is not `out`.
  Collectives& collectives() { return *parts_.collectives; }

 private:
  static constexpr int64_t kRowsAtOnce = 64;  // rows of logits under way from each rank
  static constexpr int64_t kHeadInts = 256;   // of a batch's first message
  enum Tag : int { kHead, kBody, kSum, kSlice, kTotal, kLogits, kMessage };
  static constexpr int kStart = -1, kBetween = -2;  // steps that are none
  struct Mailbox;                                   // through which a host's leader passes batches on
  struct Layout;                                    // floats of every buffer
  struct Outgoing {                                 // a batch on its way to other hosts
    std::vector<int32_t> ints;                      // its length, then the batch
    std::vector<Channel::Pending> messages;
  };

  CallName call() const;
  int leader(int host) const { return hosts()[host][0]; }
  const std::vector<std::vector<int>>& hosts() const { return parts_.order.hosts(); }
  int other(int k) const { return (host_ + k) % host_count_; }  // the k-th host after this one
  float* part(int slot, int index) const { return partials_ + (index * kSlots + slot) * padded_; }
  float* sum(int slot, int host) const;  // a host's sum, where this host's ranks read it
  bool large(int64_t floats) const;      // too large to go whole to every host
  void meet(int step, int64_t grace_ns, Idle idle);
  void begin_send(int peer, Tag tag, const void* data, int64_t bytes);
  void begin_receive(int peer, Tag tag, void* data, int64_t bytes);
  void wait();
  void put_into_mailbox(const int32_t* batch, int64_t ints);
  const int32_t* take_from_mailbox(int64_t* ints, std::vector<Channel::Pending>* outgoing);
  void wait_for_batch();
  // `folded`: this host's part stands at host_partial() already.
  void sum_hosts(int slot, int64_t floats, int step, Idle idle, bool folded);
  void add_slices(int slot, int64_t begin, int64_t end, bool folded);

  Parts parts_;
  const int host_, host_count_;
  const int leaders_;  // ranks of each host that carry a large value
  const int64_t grace_ns_;
  Segment memory_;
  StepSizes sizes_;
  std::vector<Channel::Pending> pending_, later_;
  int step_ = kStart;
  int64_t sent_ = 0;

  int64_t padded_ = 0, kept_floats_ = 0, slice_floats_ = 0;
  bool registered_ = false;    // the transport was told of the memory
  float* partials_ = nullptr;  // (ranks of this host, kSlots, padded_)
  float* sums_[kSlots] = {};   // (hosts, kept_floats_): the hosts' sums
  float* total_[kSlots] = {};  // the whole value, of a large one of three and more hosts
  float* folded_ = nullptr;    // this host's sum of such a value
  float* slices_ = nullptr;    // (hosts, slice_floats_): this rank's slice of the hosts' sums
  bool reduced_[kSlots] = {};  // the value is in total_
  float* logits_ = nullptr;    // (rows, vocab): on rank 0's host everything, elsewhere the ranks' own columns
  int64_t* counters_ = nullptr;
  uint8_t* rows_ = nullptr;
  int64_t rows_bytes_ = 0;  // of one rank
  Mailbox* mailbox_ = nullptr;
  uint32_t batches_ = 0;            // published, or received
  std::vector<Outgoing> outgoing_;  // by turns; of rank 0
  std::vector<int32_t> batch_;      // that this rank has: its length, then the batch
};

}  // namespace ckdist
