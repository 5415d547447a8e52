// The collectives of inference steps: correct for every kind of group, and without allocations after the first call of
// a size.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "comm/communicator.h"
#include "comm/transports/tcp_transport.h"

namespace {
thread_local int64_t allocations = 0;
}

void* operator new(size_t bytes) {
  allocations++;
  if (void* const at = std::malloc(bytes)) return at;
  throw std::bad_alloc();
}
// std::pmr calls these.
void* operator new(size_t bytes, std::align_val_t alignment) {
  allocations++;
  void* at = nullptr;
  if (posix_memalign(&at, std::max(sizeof(void*), size_t(alignment)), bytes) == 0) return at;
  throw std::bad_alloc();
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, size_t) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, size_t, std::align_val_t) noexcept { std::free(at); }

using namespace ckdist;

namespace {

constexpr int kRounds = 8, kWarm = 3;
constexpr double kTimeout = 60;

// (ranks, ranks) ends of socket pairs.
std::vector<int> socket_pairs(int ranks) {
  std::vector<int> sockets(size_t(ranks * ranks), -1);
  for (int a = 0; a < ranks; a++)
    for (int b = a + 1; b < ranks; b++) {
      int ends[2];
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
      sockets[a * ranks + b] = ends[0], sockets[b * ranks + a] = ends[1];
    }
  return sockets;
}

// The parts of each rank. Ranks of a host share memory if `shared`.
std::vector<Communicator::Parts> parts_of(const std::vector<int>& host_of, bool shared) {
  const int ranks = int(host_of.size());
  const Order order(host_of);
  const std::vector<int> data = socket_pairs(ranks), heartbeats = socket_pairs(ranks);
  std::vector<Communicator::Parts> all(ranks);
  for (int rank = 0; rank < ranks; rank++) {
    Communicator::Parts& own = all[rank];
    own.rank = rank, own.host_of = host_of, own.spins = 20, own.timeout_s = kTimeout;
    const std::vector<int>& here = order.hosts()[order.host_of(rank)];
    if (shared) {
      const Communicator::Parts& first = all[here[0]];
      const int index = order.index_of(rank);
      own.memory =
          std::make_shared<HostMemory>(index ? first.memory->path() : "", index, int(here.size()), int64_t{16} << 20);
      own.rendezvous =
          std::make_shared<ShmRendezvous>(index ? first.rendezvous->path() : "", index, here, own.spins, kTimeout);
      own.arenas.resize(here.size());
      std::iota(own.arenas.begin(), own.arenas.end(), 0);
    }
    if (shared && order.hosts().size() == 1) continue;
    const auto tcp =
        std::make_shared<TcpTransport>(rank, ranks, SealedSocket::all(data.data() + rank * ranks, ranks), kTimeout);
    tcp->heartbeat_sockets = SealedSocket::all(heartbeats.data() + rank * ranks, ranks);
    own.transport = tcp;
  }
  return all;
}

// Element i that rank `from` sends to rank `to` in a round.
float number(int from, int to, int round, int64_t i) { return float((from * 7 + to * 3 + round * 5 + i) % 1000); }

struct Buffers {
  std::vector<float> in, out;
  std::vector<int64_t> counts, bytes;
};

// One call of each collective with `each` floats for every rank. Returns false if a number is wrong.
bool exchange(Collectives& collectives, int rank, int ranks, int round, int64_t each, Buffers& b) {
  bool right = true;
  for (int to = 0; to < ranks; to++)
    for (int64_t i = 0; i < each; i++) b.in[to * each + i] = number(rank, to, round, i);
  collectives.all_to_all(b.in.data(), b.bytes.data(), b.out.data(), b.bytes.data());
  for (int from = 0; from < ranks; from++)
    for (int64_t i = 0; i < each; i++) right &= b.out[from * each + i] == number(from, rank, round, i);
  collectives.reduce_scatter(b.in.data(), b.out.data(), b.counts.data(), Element::f32, ReduceOp::sum);
  for (int64_t i = 0; i < each; i++) {
    float sum = 0;
    for (int from = 0; from < ranks; from++) sum += number(from, rank, round, i);
    right &= b.out[i] == sum;
  }
  collectives.all_gather(b.in.data(), b.out.data(), b.bytes.data());
  for (int from = 0; from < ranks; from++)
    for (int64_t i = 0; i < each; i++) right &= b.out[from * each + i] == number(from, 0, round, i);
  collectives.barrier();
  return right;
}

void check(const std::vector<int>& host_of, bool shared, int64_t each) {
  const int ranks = int(host_of.size());
  std::vector<Communicator::Parts> parts = parts_of(host_of, shared);
  std::atomic<int64_t> late{0}, wrong{0};
  const auto work = [&](int rank) {
    Communicator communicator(std::move(parts[rank]));
    const auto steps = communicator.steps({100, 1, ranks, rank, 1, 10});
    Buffers b{std::vector<float>(ranks * each), std::vector<float>(ranks * each), std::vector<int64_t>(ranks, each),
              std::vector<int64_t>(ranks, each * 4)};
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (int round = 0; round < kRounds; round++) {
      const int64_t before = allocations;
      wrong += !exchange(steps->collectives(), rank, ranks, round, each, b);
      // The pool of messages grows in a round in which more of them are early. In the last round peers may have left
      // already, and their neighbours record that.
      if (round >= kWarm && round + 1 < kRounds) fewest = std::min(fewest, allocations - before);
    }
    late += fewest;
    communicator.leave();
  };
  std::vector<std::thread> others;
  for (int rank = 1; rank < ranks; rank++) others.emplace_back(work, rank);
  work(0);
  for (std::thread& thread : others) thread.join();
  CHECK(wrong == 0);
  CHECK(late == 0);
}

}  // namespace

TEST_CASE("a replay's collectives move the right numbers and allocate nothing") {
  for (const int64_t each : {1, 300, 40'000}) {
    CAPTURE(each);
    SUBCASE("ranks that share memory") { check({0, 0, 0}, true, each); }
    SUBCASE("ranks of hosts of their own") { check({0, 1, 2}, false, each); }
    SUBCASE("several ranks on each of two hosts") { check({0, 0, 1, 1}, true, each); }
    SUBCASE("hosts of unequal size") { check({0, 0, 1}, true, each); }
  }
}
