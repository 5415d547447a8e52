// Ranks as threads, each with a pool of threads, in thousands of steps. Build it with -fsanitize=thread, which detects
// every access that is not ordered by a barrier, a flag or the rule of slots.
#include <sys/socket.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "comm/failure/failure_detector.h"
#include "comm/step_communicator.h"
#include "comm/transports/shm_transport.h"
#include "comm/transports/tcp_transport.h"
#include "core/error.h"
#include "kernels/kernels.h"
#include "runtime/pool.h"

using namespace ckdist;

thread_local int64_t allocations = 0;
void* operator new(size_t bytes) {
  allocations++;
  if (void* const at = std::malloc(bytes)) return at;
  throw std::bad_alloc();
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, size_t) noexcept { std::free(at); }

namespace ckdist {
void set_last_error(const char*) {}
const Kernels& kernels() { std::abort(); }    // ranks of one host, and small values of several hosts, are not folded
int64_t available_memory() { std::abort(); }  // or allocated
}  // namespace ckdist

namespace {

constexpr int64_t kFloats = 500, kRows = 3, kVocab = 97, kInts = 40;
constexpr int kSpins = 20;
constexpr double kTimeout = 60;

uint32_t mix(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t h = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u;
  return h ^ h >> 15;
}
float number(uint32_t rank, uint32_t round, uint32_t i) { return float(mix(rank, round, i) % 1000) / 7; }

[[noreturn]] void wrong(const char* what, int rank, int round) {
  std::printf("%s is wrong on rank %d in round %d\n", what, rank, round);
  std::fflush(stdout);
  std::_Exit(1);
}

std::atomic<int64_t> late_allocations{0};
template <class Call>
void counted(bool late, Call&& call) {
  const int64_t before = allocations;
  call();
  if (late) late_allocations += allocations - before;
}

std::vector<int> numbered(int ranks) {
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

StepSizes sizes_of(int rank, int ranks) {
  const int64_t begin = kVocab * rank / ranks;
  return {kFloats, kRows, kVocab, begin, kVocab * (rank + 1) / ranks - begin, kInts};
}

// One rank's connections to the others.
struct Link {
  Order order;
  std::shared_ptr<ShmRendezvous> rendezvous;  // null: over TCP, every rank counts as a host
  std::shared_ptr<Transport> transport;
  Segment memory;
};

// The first rank of a host creates the segments that the others open.
Link share(int rank, int ranks, const Link* first) {
  const Order order(std::vector<int>(ranks, 0));
  const int64_t bytes = StepCommunicator::memory_bytes(order, rank, Thresholds{}, sizes_of(rank, ranks));
  const auto rendezvous =
      std::make_shared<ShmRendezvous>(first ? first->rendezvous->path() : "", rank, numbered(ranks), kSpins, kTimeout);
  return {order, rendezvous, std::make_shared<ShmTransport>(*rendezvous, nullptr, numbered(ranks), kTimeout),
          first ? Segment(first->memory.path(), bytes) : Segment(bytes)};
}

// sockets: (ranks, ranks), one for data or one for heartbeats.
Link connect(int rank, int ranks, const std::vector<int>& data, const std::vector<int>& heartbeats) {
  const Order order(numbered(ranks));
  const auto tcp =
      std::make_shared<TcpTransport>(rank, ranks, SealedSocket::all(data.data() + rank * ranks, ranks), kTimeout);
  tcp->heartbeat_sockets = SealedSocket::all(heartbeats.data() + rank * ranks, ranks);
  return {order, nullptr, tcp,
          Segment(StepCommunicator::memory_bytes(order, rank, Thresholds{}, sizes_of(rank, ranks)))};
}

std::vector<int> socket_pairs(int ranks) {
  std::vector<int> sockets(size_t(ranks * ranks), -1);
  for (int a = 0; a < ranks; a++)
    for (int b = a + 1; b < ranks; b++) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) std::abort();
      sockets[a * ranks + b] = ends[0], sockets[b * ranks + a] = ends[1];
    }
  return sockets;
}

// Sends from rank to rank like the stages of a pipeline.
void pass_on(StepCommunicator& steps, int round, bool late) {
  int32_t message[kInts];
  if (steps.rank > 0) {
    counted(late, [&] { steps.recv(steps.rank - 1, message, sizeof message, round); });
    if (message[0] != round * 100 + steps.rank - 1) wrong("message", steps.rank, round);
  }
  message[0] = round * 100 + steps.rank;
  if (steps.rank + 1 < steps.size) counted(late, [&] { steps.send(steps.rank + 1, message, sizeof message, round); });
}

// Sums a value between hosts in chunks.
void sum(StepCommunicator& steps, int slot, int64_t floats, int chunks, int step) {
  if (steps.host_count() == 1) return steps.all_reduce(slot, floats, step);
  for (int c = 0; c < chunks; c++) {
    steps.begin_chunk({slot, floats, false}, {floats * c / chunks, floats * (c + 1) / chunks}, step);
    steps.test_chunks();
  }
  steps.wait_chunks(step);
}

void work(const Link& link, int rank, int ranks, int threads, int rounds) {
  const auto all = numbered(ranks);
  const auto detector = std::make_shared<FailureDetector>(
      rank, ranks, link.rendezvous, link.rendezvous ? all : std::vector<int>{}, link.transport, kTimeout);
  detector->join();
  if (link.rendezvous) link.rendezvous->watch(detector.get());
  std::vector<StepCommunicator::Columns> every(ranks);
  for (int r = 0; r < ranks; r++) every[r] = {sizes_of(r, ranks).first_column, sizes_of(r, ranks).columns};
  const auto [begin, columns] = every[rank];
  StepCommunicator steps(
      {link.order, rank, link.rendezvous,
       std::make_unique<Channel>(link.transport, 1, all, all, rank, detector, Patience{1000, 1000, 100'000}), nullptr,
       Thresholds{}, every},
      link.memory, sizes_of(rank, ranks));
  Pool pool(threads, {}, {}, kSpins);
  for (int round = 0; round < rounds; round++) {
    const bool late = round >= rounds / 2;
    for (int burst = 0; burst < 1 + round % 3; burst++) {
      int32_t message[kInts];
      int64_t ints = 1 + mix(round, burst, 1) % kInts;
      for (int i = 0; i < kInts; i++) message[i] = int32_t(mix(round, burst, i));
      const int32_t* got = message;
      counted(late, [&] {
        if (rank == 0) steps.publish(message, ints);
        else got = steps.receive(&ints);
      });
      if (ints != 1 + int64_t(mix(round, burst, 1) % kInts)) wrong("length of a message", rank, round);
      for (int i = 0; i < ints; i++)
        if (got[i] != int32_t(mix(round, burst, i))) wrong("message", rank, round);
    }
    const int active = 1 + int(mix(round, 3, rank) % threads);
    const int reduces = 1 + int(mix(round, 4, 0) % 4);
    pool.run(active, [&](int thread) {
      for (int n = 0; n < reduces; n++) {
        const int slot = n % kSlots;
        const int64_t floats = 1 + mix(round, n, 5) % kFloats;
        for (int64_t i = thread; i < floats; i += active) steps.partial(slot)[i] = number(rank, round * 4 + n, i);
        pool.barrier(thread,
                     [&] { counted(late, [&] { sum(steps, slot, floats, 1 + int(mix(round, n, 6) % 8), n); }); });
        const float* parts[kMaxRanks];
        const int count = steps.summands(slot, parts);
        for (int64_t i = (thread + 1) % active; i < floats; i += active) {
          float sum = 0, expected = 0;
          for (int r = 0; r < count; r++) sum += parts[r][i];
          for (int r = 0; r < ranks; r++) expected += number(r, round * 4 + n, i);
          if (sum != expected) wrong("sum", rank, round);
        }
      }
      const int64_t rows = 1 + mix(round, 6, 0) % kRows;
      int64_t stride;
      float* logits = steps.logits(&stride);
      for (int64_t t = thread; t < rows; t += active)
        for (int64_t c = 0; c < columns; c++) logits[t * stride + c] = number(round, t, begin + c);
      pool.barrier(thread, [&] { counted(late, [&] { steps.gather_logits(rows, reduces); }); });
    });
    pass_on(steps, round, late);
    const int64_t rows = 1 + mix(round, 6, 0) % kRows;
    for (int64_t t = 0; rank == 0 && t < rows; t++)
      for (int64_t c = 0; c < kVocab; c++)
        if (steps.gathered()[t * kVocab + c] != number(round, t, c)) wrong("row of logits", rank, round);
  }
  // The last rank fails. Every other rank must report it, in all of its threads.
  try {
    pool.run(threads, [&](int thread) {
      if (rank == ranks - 1 && thread == threads - 1) fail(Status::native, "meant to fail");
      pool.barrier(thread, [&] { steps.all_reduce(0, 1, 0); });
    });
    wrong("outcome of a failed step", rank, rounds);
  } catch (const Error& error) { detector->give_up(error.what()); }
  detector->leave();
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) return 2;
  const bool shm = std::string(words[1]) == "shm";
  const int ranks = std::atoi(words[2]), threads = std::atoi(words[3]), rounds = std::atoi(words[4]);
  const std::vector<int> data = socket_pairs(ranks), heartbeats = socket_pairs(ranks);
  const Link first = shm ? share(0, ranks, nullptr) : connect(0, ranks, data, heartbeats);
  std::vector<std::thread> others;
  for (int r = 1; r < ranks; r++)
    others.emplace_back([&, r] {
      work(shm ? share(r, ranks, &first) : connect(r, ranks, data, heartbeats), r, ranks, threads, rounds);
    });
  work(first, 0, ranks, threads, rounds);
  for (std::thread& t : others) t.join();
  if (late_allocations) std::printf("%lld allocations in later steps\n", (long long)late_allocations);
  return late_allocations != 0;
}
