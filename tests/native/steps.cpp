// Ranks as threads, each with a pool of threads, rendezvous thousands of times: to be built with -fsanitize=thread,
// which sees every access that no barrier, flag or slot rule orders.
//
//   steps RANKS THREADS ROUNDS      exits with 1 and a line on a wrong number
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "comm/failure/failure_detector.h"
#include "comm/step_communicator.h"
#include "comm/transports/shm_transport.h"
#include "core/error.h"
#include "kernels/kernels.h"
#include "runtime/pool.h"

using namespace ckdist;

namespace ckdist {
void set_last_error(const char*) {}
const Kernels& kernels() { std::abort(); }    // the ranks of one host fold nothing
int64_t available_memory() { std::abort(); }  // nor allocate
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

// What ranks of one host share: the first makes it.
struct Shared {
  std::shared_ptr<ShmRendezvous> rendezvous;
  Segment memory;
};

StepSizes sizes_of(int rank, int ranks) {
  const int64_t begin = kVocab * rank / ranks;
  return {kFloats, kRows, kVocab, begin, kVocab * (rank + 1) / ranks - begin, kInts};
}

Shared share(int rank, int ranks, const Shared* first) {
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  const int64_t bytes =
      StepCommunicator::memory_bytes(Order(std::vector<int>(ranks, 0)), rank, Thresholds{}, sizes_of(rank, ranks));
  return {std::make_shared<ShmRendezvous>(first ? first->rendezvous->path() : "", rank, all, kSpins, kTimeout),
          first ? Segment(first->memory.path(), bytes) : Segment(bytes)};
}

void work(const Shared& shared, int rank, int ranks, int threads, int rounds) {
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  const auto transport = std::make_shared<ShmTransport>(*shared.rendezvous, nullptr, all, kTimeout);
  const auto detector = std::make_shared<FailureDetector>(rank, ranks, shared.rendezvous, all, transport, kTimeout);
  detector->join();
  shared.rendezvous->watch(detector.get());
  std::vector<StepCommunicator::Columns> every(ranks);
  for (int r = 0; r < ranks; r++) every[r] = {sizes_of(r, ranks).first_column, sizes_of(r, ranks).columns};
  const auto [begin, columns] = every[rank];
  StepCommunicator steps(
      {Order(std::vector<int>(ranks, 0)), rank, shared.rendezvous,
       std::make_unique<Channel>(transport, 1, all, all, rank, detector, Patience{1000, 1000, 100'000}), nullptr,
       Thresholds{}, every},
      shared.memory, sizes_of(rank, ranks));
  Pool pool(threads, {}, kSpins);
  for (int round = 0; round < rounds; round++) {
    for (int burst = 0; burst < 1 + round % 3; burst++) {
      int32_t message[kInts];
      int64_t ints = 1 + mix(round, burst, 1) % kInts;
      for (int i = 0; i < kInts; i++) message[i] = int32_t(mix(round, burst, i));
      const int32_t* got = message;
      if (rank == 0) steps.publish(message, ints);
      else got = steps.receive(&ints);
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
        pool.barrier([&] { steps.all_reduce(slot, floats, n); });
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
      pool.barrier([&] { steps.gather_logits(rows, reduces); });
    });
    const int64_t rows = 1 + mix(round, 6, 0) % kRows;
    for (int64_t t = 0; rank == 0 && t < rows; t++)
      for (int64_t c = 0; c < kVocab; c++)
        if (steps.gathered()[t * kVocab + c] != number(round, t, c)) wrong("row of logits", rank, round);
  }
  // The last rank fails: every other one must be told, in all of its threads.
  try {
    pool.run(threads, [&](int thread) {
      if (rank == ranks - 1 && thread == threads - 1) fail(Status::native, "meant to fail");
      pool.barrier([&] { steps.all_reduce(0, 1, 0); });
    });
    wrong("outcome of a failed step", rank, rounds);
  } catch (const Error& error) { detector->give_up(error.what()); }
  detector->leave();
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 2;
  const int ranks = std::atoi(words[1]), threads = std::atoi(words[2]), rounds = std::atoi(words[3]);
  const Shared first = share(0, ranks, nullptr);
  std::vector<std::thread> others;
  for (int r = 1; r < ranks; r++)
    others.emplace_back([&, r] { work(share(r, ranks, &first), r, ranks, threads, rounds); });
  work(first, 0, ranks, threads, rounds);
  for (std::thread& t : others) t.join();
}
