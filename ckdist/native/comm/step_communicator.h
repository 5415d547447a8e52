// The view of a communicator for inference steps: batches from rank 0, sums of partial values, logits at rank 0,
// messages between ranks.
//
// Communicator::steps creates it once. After that no memory is allocated, and all buffers are registered with the
// transport. One thread of a rank calls it at a time, and no collective of the communicator runs meanwhile. A step
// begins with a batch and ends with gather_logits. Sums are computed in float32 in the order of
// comm/algorithms/order.h.
//
// Inside a host, ranks write partial values to shared memory: an all_reduce is one barrier, and readers add the
// summands in place. Each rank's buffers are first touched by their owner, so their pages lie on its NUMA node.
//
// Between hosts, the hosts' sums are exchanged: small values by one rank of each host (the leader); large values by
// every rank with the ranks of the same local rank, each for its own slice. With few hosts or small values every host
// keeps the sums of all hosts, and readers add them. Large values of three or more hosts are summed slice by slice,
// which moves less data. Without shared memory, every rank counts as a host. A sum between hosts can be begun in chunks
// and waited for later; its bits do not depend on the chunks.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "comm/algorithms/collectives.h"
#include "comm/algorithms/order.h"
#include "comm/bootstrap/segment.h"
#include "comm/bootstrap/shm_rendezvous.h"
#include "comm/channel.h"
#include "core/range.h"

namespace ckdist {

// Buffers of partial values. They alternate: all ranks pass the next slot before one is written again.
constexpr int kSlots = 2;

struct StepSizes {
  int64_t partial_floats;           // maximum floats of one partial value
  int64_t logit_rows, vocab;        // maximum rows of gathered logits, their columns
  int64_t first_column, columns;    // columns of the logits that this rank computes
  int64_t batch_ints;               // maximum ints of one batch
  int64_t counters = 0;             // counters of each rank
  int64_t rows = 0, row_bytes = 0;  // maximum rows that are sharded over hosts and passed on inside a host
  int64_t batches = 1;              // maximum batches that are published before a rank has received the first of them
};

class StepCommunicator {
 public:
  struct Columns {
    int64_t first, count;
  };
  struct Parts {
    Order order;
    int rank;
    std::shared_ptr<ShmRendezvous> rendezvous;  // of this host's ranks; null: no shared memory
    std::unique_ptr<Channel> channel;           // only for these messages
    Collectives* collectives;
    Thresholds thresholds;
    std::vector<Columns> columns;  // columns of the logits, by rank
  };
  // Bytes of shared memory of the ranks of this host.
  static int64_t memory_bytes(const Order& order, int rank, const Thresholds& thresholds, const StepSizes& sizes);
  // `memory`: memory_bytes() zeros; no page is touched yet. A collective call.
  StepCommunicator(Parts parts, Segment memory, const StepSizes& sizes);

  const int rank, size;
  const int local_rank, local_size;  // among the ranks that share memory with this one

  // Rank 0 publishes one batch to every other rank. The others wait for it without using a core, and may read it until
  // they receive the next. Batches may follow each other immediately; rank 0 waits if the ranks have no room for more.
  // `last`: no other batch may follow, so this call waits until all have been sent. While a rank waits, it calls
  // `progress()`, which continues messages that are on their way, until that returns false.
  void publish(const int32_t* batch, int64_t ints, bool last = false);
  const int32_t* receive(int64_t* ints, const std::function<bool()>& progress = {});

  // `step` is named in errors; `idle` is called between polls.

  // Buffer for this rank's part of the value in `slot`.
  float* partial(int slot) { return part(slot, local_rank); }
  // Returns when summands(slot) may be read.
  void all_reduce(int slot, int64_t floats, int step, Idle idle = {});
  // The summands of the value in `slot`, in order; returns their number. The value is their sum from first to last.
  int summands(int slot, const float** out) const;

  // peers: values in `slot` of the ranks that share memory, by local rank. all_gather returns when they may be read.
  void peers(int slot, const float** out) const;
  void all_gather(int step, Idle idle = {}) { meet(step, grace_ns_, idle); }

  // For a value that is partial over hosts only: the buffer that a host's ranks write together.
  float* host_partial(int slot, int64_t floats);

  // A sum over several hosts of the value in `slot`. by_rank: the value is partial over hosts only, and a rank begins
  // and reads only its own floats. Else all ranks of a host begin the same chunks.
  struct HostSum {
    int slot;
    int64_t floats;  // of the whole value
    bool by_rank;
  };
  static constexpr int kMaxChunks = 8;
  int64_t chunk_bytes() const { return parts_.thresholds.chunk_bytes; }
  // Begins to sum floats [begin, end), which the host's ranks have written. Ranks with the same local rank begin the
  // same chunks in the same order, at most kMaxChunks. Then they call wait_chunks, which returns when summands(slot)
  // may be read. test_chunks makes progress, and returns the number of chunks that have arrived, in order.
  void begin_chunk(const HostSum& sum, Range chunk, int step, Idle idle = {});
  int test_chunks();
  void wait_chunks(int step, Idle idle = {});

  // Buffer for this rank's columns of the logits. `stride` is in floats.
  float* logits(int64_t* stride);
  // Returns when rank 0 may read all columns at gathered(), (rows, vocab), until it publishes again.
  void gather_logits(int64_t rows, int step);
  const float* gathered() const { return logits_; }

  // Messages between two ranks arrive in order, and must have the size that the receiver expects. Memory of
  // Communicator::allocate is read in place on the same host, and by RDMA.
  Channel::Pending isend(int peer, const void* data, int64_t bytes);
  Channel::Pending irecv(int peer, void* data, int64_t bytes);
  void wait(Channel::Pending& message, int step);
  bool test(Channel::Pending& message) { return parts_.channel->test(message); }
  void send(int peer, const void* data, int64_t bytes, int step);
  void recv(int peer, void* data, int64_t bytes, int step);
  // Shows other ranks that this rank has made a step, so that they continue to wait for it.
  void count_step() { parts_.channel->count_step(); }

  // The hosts, in the order in which their values are added. same_place: the rank of another host with this local rank.
  // fold_hosts: `out` = sum over hosts of `parts`.
  int host() const { return host_; }
  int host_count() const { return host_count_; }
  int same_place(int host) const { return hosts()[host][local_rank]; }
  void fold_hosts(float* out, const float* const* parts, int64_t floats) const;
  // out = sum over this host's ranks of floats [begin, end) of their parts in `slot`.
  void fold_local(int slot, int64_t begin, int64_t end, float* out) const;
  // Buffer of a rank of this host for rows that the others read. It has two halves, which alternate.
  uint8_t* rows(int half, int local_rank) const { return rows_ + (half * local_size + local_rank) * rows_bytes_; }
  // Counters of a rank of this host, initially zero. Their rank writes them during batches; others read them between
  // batches.
  int64_t* counters(int local_rank) const { return counters_ + local_rank * sizes_.counters; }
  // Bytes that this rank has sent to other hosts.
  int64_t sent() const { return sent_; }

  // For memory of many messages; see Transport.
  bool register_memory(void* base, int64_t bytes) { return parts_.channel->register_memory(base, bytes); }
  void forget_memory(void* base) { parts_.channel->forget_memory(base); }

  // Collectives on any buffers, over all ranks: all_gather, reduce_scatter, all_to_all, barrier. No memory is allocated
  // after the first call of a size, if `in` is not `out`.
  Collectives& collectives() { return *parts_.collectives; }

 private:
  static constexpr int64_t kRowsAtOnce = 64;  // rows of logits in flight from each rank
  static constexpr int64_t kHeadInts = 256;   // ints of a batch's first message
  enum Tag : int { kHead, kBody, kSum, kSlice, kTotal, kLogits, kMessage };
  static constexpr int kStart = -1, kBetween = -2;  // values of step_ outside of steps
  struct Mailbox;                                   // for a host's leader to pass batches on
  struct Layout;                                    // floats of every buffer
  struct Outgoing {                                 // a batch on its way to other hosts
    std::vector<int32_t> ints;                      // its length, then the batch
    std::vector<Channel::Pending> messages;
  };
  struct Chunk {  // a part of a sum on its way: the floats that this rank exchanges
    int slot;
    Range floats;
    float* slices;                               // other hosts' parts of this host's slice; null: sums are sent whole
    std::vector<Channel::Pending> sums, totals;  // messages with summands, and with the total of each host's slice
  };

  CallName call() const;
  int leader(int host) const { return hosts()[host][0]; }
  const std::vector<std::vector<int>>& hosts() const { return parts_.order.hosts(); }
  int other(int k) const { return (host_ + k) % host_count_; }  // the k-th host after this one
  float* part(int slot, int index) const { return partials_ + (index * kSlots + slot) * padded_; }
  float* sum(int slot, int host) const;             // a host's sum, which this host's ranks read
  float* host_sum(int slot, bool in_slices) const;  // this host's sum, from which it is sent
  bool large(int64_t floats) const;                 // true if too large to send whole to every host
  void meet(int step, int64_t grace_ns, Idle idle);
  using Messages = std::vector<Channel::Pending>;
  void begin_send(Messages& messages, int peer, Tag tag, const void* data, int64_t bytes);
  void begin_receive(Messages& messages, int peer, Tag tag, void* data, int64_t bytes);
  void wait();
  bool test(Messages& messages);
  void put_into_mailbox(const int32_t* batch, int64_t ints);
  const int32_t* take_from_mailbox(int64_t* ints, const std::function<bool()>& progress);
  void wait_for_batch();
  // The part of a chunk that the ranks of a host carry between hosts.
  Range slice_of(const Chunk& chunk, int host) const;
  void add_slices(Chunk& chunk);

  struct Registered {  // memory of the transport
    Channel* channel = nullptr;
    void* base = nullptr;
    ~Registered() {
      if (channel) channel->forget_memory(base);
    }
  };

  Parts parts_;
  const int host_, host_count_;
  const int leaders_;  // ranks of each host that carry a large value
  const int64_t grace_ns_;
  Segment memory_;
  Registered registered_;  // memory_, if the transport needs it
  StepSizes sizes_;
  Messages pending_;
  Chunk chunks_[kMaxChunks];
  int begun_ = 0, arrived_ = 0;  // number of chunks of the current sum
  int64_t slices_used_ = 0;      // floats of each host's slices_
  int step_ = kStart;
  int64_t sent_ = 0;

  int64_t padded_ = 0, kept_floats_ = 0, slice_floats_ = 0;
  float* partials_ = nullptr;  // (ranks of this host, kSlots, padded_)
  float* sums_[kSlots] = {};   // (hosts, kept_floats_): sums of the hosts
  float* total_[kSlots] = {};  // the total of a large value of three or more hosts
  float* folded_ = nullptr;    // this host's sum of such a value
  float* slices_ = nullptr;    // (hosts, slice_floats_): this rank's slice of the hosts' sums
  bool reduced_[kSlots] = {};  // the total is in total_
  float* logits_ = nullptr;    // (rows, vocab): all columns on rank 0's host, else only those of the host's ranks
  int64_t* counters_ = nullptr;
  uint8_t* rows_ = nullptr;
  int64_t rows_bytes_ = 0;  // of one rank
  Mailbox* mailbox_ = nullptr;
  uint32_t batches_ = 0;            // number of published or received batches
  std::vector<Outgoing> outgoing_;  // ring of rank 0's batches
  std::vector<int32_t> batch_;      // this rank's batch: its length, then the batch
};

}  // namespace ckdist
