#include "comm/communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/algorithms/flat_collectives.h"
#include "comm/algorithms/hierarchical_collectives.h"
#include "comm/algorithms/shm_collectives.h"
#include "comm/transports/shm_transport.h"
#include "core/error.h"

namespace ckdist {

namespace {

constexpr Patience kPatience{50'000, 50'000, 200'000};
// A step's messages are short. A rank that sleeps would be late for the next barrier.
constexpr int64_t kStepYieldNs = 1'000'000, kStepNapNs = 1'000'000;
constexpr int64_t kPollNs = 10;  // to poll a flag; a transport's polls take 10 to 50 times as long

struct Path {  // of a segment, for ranks of the same host
  char text[64];
};

std::vector<int> ranks_or_all(const std::vector<int>& ranks, size_t size) {
  if (!ranks.empty()) return ranks;
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

Communicator::Communicator(Parts given)
    : rank(given.rank), size(int(given.host_of.size())), parts_(std::move(given)), order_(parts_.host_of) {
  if (size > kMaxRanks) fail(Status::config, "%d ranks; at most %d are supported", size, kMaxRanks);
  const bool one_host = order_.hosts().size() == 1 && parts_.rendezvous;
  if (one_host && !parts_.transport_ranks.empty()) parts_.transport = nullptr;
  if (!parts_.transport && !one_host)
    fail(Status::config, "ranks on %zu hosts need a transport between them", order_.hosts().size());
  if (!parts_.transport || one_host)
    parts_.transport =
        std::make_shared<ShmTransport>(*parts_.rendezvous, parts_.memory, parts_.arenas, parts_.timeout_s),
    parts_.context = 0, parts_.transport_ranks.clear();
  parts_.names = ranks_or_all(parts_.names, size_t(size));
  if (!parts_.detector) {
    const std::vector<int> local = parts_.rendezvous ? order_.hosts()[order_.host_of(rank)] : std::vector<int>{};
    parts_.detector =
        std::make_shared<FailureDetector>(rank, size, parts_.rendezvous, local, parts_.transport, parts_.timeout_s);
  }
  parts_.detector->join();
  if (parts_.rendezvous) parts_.rendezvous->watch(parts_.detector.get());
  channel_ =
      std::make_shared<Channel>(parts_.transport, parts_.context, ranks_or_all(parts_.transport_ranks, size_t(size)),
                                parts_.names, rank, parts_.detector, kPatience);
  const bool hybrid = !one_host && parts_.rendezvous && int(order_.hosts().size()) < size;
  transport_ = std::string(hybrid ? "shared memory and " : "") + channel_->name();
  if (one_host)
    collectives_ =
        std::make_unique<ShmCollectives>(*parts_.rendezvous, parts_.memory, parts_.arenas, parts_.thresholds);
  else if (hybrid)
    collectives_ = std::make_unique<HierarchicalCollectives>(channel_, order_, parts_.thresholds, *parts_.rendezvous,
                                                             parts_.memory, parts_.arenas);
  else collectives_ = std::make_unique<FlatCollectives>(channel_, order_, parts_.thresholds);
}

Communicator::~Communicator() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
  collectives_.reset();
  leave();
}

void Communicator::leave() {
  if (!left_.exchange(true)) parts_.detector->leave();
}

template <class Body>
auto Communicator::guarded(Body&& body) {
  if (parts_.detector->lost() && !failed_) abandon(parts_.detector->reason());
  if (failed_) {
    std::lock_guard<std::mutex> lock(mutex_);
    fail(Status::comm, "%s", failure_.c_str());
  }
  try {
    return body();
  } catch (const Error& error) {
    if (error.status() == Status::comm) abandon(error.what());
    throw;
  }
}

void Communicator::abandon(const char* reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = reason;
    failed_ = true;
  }
  parts_.detector->give_up(reason);
  if (parts_.rendezvous) parts_.rendezvous->abandon(reason);
  channel_->abandon(reason);
}

void Communicator::check_peers() {
  guarded([] {});
}

void Communicator::run(const std::function<void(Collectives&)>& body) {
  if (has_worker_) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty(); });
  }
  std::lock_guard<std::mutex> turn(running_);
  guarded([&] { body(*collectives_); });
}

std::shared_ptr<Communicator::Operation> Communicator::begin(std::function<void(Collectives&)> body) {
  auto operation = std::make_shared<Operation>();
  operation->communicator = this;
  operation->body = std::move(body);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) fail(Status::comm, "%s", failure_.c_str());
  queue_.push_back(operation);
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); }), has_worker_ = true;
  changed_.notify_all();
  return operation;
}

void Communicator::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return leaving_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::shared_ptr<Operation> operation = queue_.front();
    lock.unlock();
    std::exception_ptr error;
    try {
      std::lock_guard<std::mutex> turn(running_);
      guarded([&] { operation->body(*collectives_); });
    } catch (...) { error = std::current_exception(); }
    lock.lock();
    operation->done = true;
    operation->error = error;
    queue_.pop_front();
    changed_.notify_all();
  }
}

bool Communicator::Operation::test() {
  Communicator& c = *communicator;
  if (body) {
    std::lock_guard<std::mutex> lock(c.mutex_);
    if (error) std::rethrow_exception(error);
    return done;
  }
  if (!done) done = c.guarded([&] { return c.channel_->test(pending); });
  return done;
}

void Communicator::Operation::wait() {
  Communicator& c = *communicator;
  if (body) {
    std::unique_lock<std::mutex> lock(c.mutex_);
    c.changed_.wait(lock, [&] { return done; });
    if (error) std::rethrow_exception(error);
    return;
  }
  if (!done) c.guarded([&] { c.channel_->wait(pending, {"a message"}); });
  done = true;
}

void Communicator::check_peer(int peer, int number) const {
  if (peer < 0 || peer >= size || peer == rank)
    fail(Status::config, "rank %d of %d cannot exchange messages with rank %d", rank, size, peer);
  if (number < 0 || number >= Channel::kUserTags)
    fail(Status::config, "%d is not a tag or a window; use 0 to %d", number, Channel::kUserTags - 1);
}

std::shared_ptr<Communicator::Operation> Communicator::message(const std::function<Channel::Pending()>& start) {
  auto operation = std::make_shared<Operation>();
  operation->communicator = this;
  operation->pending = guarded(start);
  return operation;
}

std::shared_ptr<Communicator::Operation> Communicator::isend(int peer, int tag, const void* data, int64_t bytes) {
  check_peer(peer, tag);
  return message([&] { return channel_->isend(peer, tag, data, bytes); });
}

std::shared_ptr<Communicator::Operation> Communicator::irecv(int peer, int tag, void* data, int64_t bytes) {
  check_peer(peer, tag);
  return message([&] { return channel_->irecv(peer, tag, data, bytes); });
}

void Communicator::expose(int window, void* base, int64_t bytes) {
  if (window < 0 || window >= Channel::kUserTags)
    fail(Status::config, "%d is not a window; use 0 to %d", window, Channel::kUserTags - 1);
  guarded([&] { channel_->expose(window, base, bytes); });
  std::vector<Place> places = gather(Place{parts_.rendezvous ? parts_.memory->offset(base, bytes) : -1, bytes});
  if (parts_.rendezvous)
    parts_.rendezvous->serve_with([channel = channel_.get(), window] { channel->notified(window, 0); });
  std::lock_guard<std::mutex> lock(mutex_);
  windows_[window] = std::move(places);
}

uint8_t* Communicator::in_reach(int peer, int window, int64_t offset, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = windows_.find(window);
  if (at == windows_.end()) fail(Status::config, "window %d is not exposed", window);
  const Place& place = at->second[peer];
  if (offset < 0 || offset > place.bytes || bytes > place.bytes - offset)
    fail(Status::config, "%lld bytes at offset %lld lie beyond rank %d's window %d of %lld bytes", (long long)bytes,
         (long long)offset, peer, window, (long long)place.bytes);
  if (place.offset < 0 || order_.host_of(peer) != order_.host_of(rank)) return nullptr;
  return parts_.memory->arena(parts_.arenas[order_.index_of(peer)]) + place.offset + offset;
}

std::shared_ptr<Communicator::Operation> Communicator::iput(int peer, int window, int64_t offset, const void* data,
                                                            int64_t bytes) {
  check_peer(peer, window);
  uint8_t* const direct = in_reach(peer, window, offset, bytes);
  if (direct && bytes) std::memcpy(direct, data, size_t(bytes));
  return message(
      [&] { return direct ? Channel::Pending{0, peer} : channel_->iput(peer, window, offset, data, bytes); });
}

std::shared_ptr<Communicator::Operation> Communicator::iget(int peer, int window, int64_t offset, void* data,
                                                            int64_t bytes) {
  check_peer(peer, window);
  const uint8_t* const direct = in_reach(peer, window, offset, bytes);
  if (direct && bytes) std::memcpy(data, direct, size_t(bytes));
  return message(
      [&] { return direct ? Channel::Pending{0, peer} : channel_->iget(peer, window, offset, data, bytes); });
}

std::shared_ptr<Communicator::Operation> Communicator::inotify(int peer, int window, int slot) {
  check_peer(peer, window);
  return message([&] { return channel_->inotify(peer, window, slot); });
}

void Communicator::await_notified(int window, int slot, uint64_t count) {
  Transport::check_slot(slot);
  guarded([&] {
    const int64_t start = now_ns();
    for (int polls = 0; channel_->notified(window, slot) < count; polls++) {
      if (polls < 2000) {
        cpu_pause();
        continue;
      }
      if (now_ns() - start > channel_->timeout_ns())
        fail(Status::comm, "window %d, slot %d of rank %d was notified %llu times within %.0f s, not %llu times",
             window, slot, rank, (unsigned long long)channel_->notified(window, slot), channel_->timeout_ns() / 1e9,
             (unsigned long long)count);
      channel_->idle(200'000);
    }
  });
}

template <class T>
std::vector<T> Communicator::gather(const T& own) {
  std::vector<T> all(size);
  const std::vector<int64_t> bytes(size, sizeof(T));
  run([&](Collectives& c) { c.all_gather(&own, all.data(), bytes.data()); });
  return all;
}

// A number for messages that must not match others. It is the same on all ranks.
int Communicator::next_context() {
  const std::vector<int> made = gather(parts_.transport->contexts);
  const int context = *std::max_element(made.begin(), made.end());
  parts_.transport->contexts = context + 1;
  return context;
}

std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  struct Member {
    int32_t color, key, rank, arena;
  };
  const std::vector<Member> all = gather(Member{color, key, rank, parts_.rendezvous ? parts_.memory->index : 0});
  const int context = next_context();

  std::vector<Member> members;
  std::copy_if(all.begin(), all.end(), std::back_inserter(members),
               [&](const Member& m) { return color >= 0 && m.color == color; });
  std::stable_sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return a.key < b.key; });
  Parts parts;
  std::vector<int> here, names;  // members on this host: ranks of the new group, ranks of the job
  for (const Member& m : members) {
    const int r = int(parts.host_of.size());
    if (m.rank == rank) parts.rank = r;
    parts.host_of.push_back(parts_.host_of[m.rank]);
    parts.transport_ranks.push_back(channel_->ranks()[m.rank]);
    parts.names.push_back(parts_.names[m.rank]);
    if (parts_.host_of[m.rank] != parts_.host_of[rank]) continue;
    here.push_back(r), names.push_back(parts_.names[m.rank]);
    parts.arenas.push_back(m.arena);
  }
  Path path{};
  const int place = int(std::find(here.begin(), here.end(), parts.rank) - here.begin());
  if (!members.empty() && parts_.rendezvous && place == 0) {
    parts.rendezvous = std::make_shared<ShmRendezvous>("", 0, names, parts_.spins, parts_.timeout_s);
    std::strncpy(path.text, parts.rendezvous->path().c_str(), sizeof path.text - 1);
  }
  const std::vector<Path> paths = gather(path);
  if (!members.empty() && parts_.rendezvous && place > 0)
    parts.rendezvous = std::make_shared<ShmRendezvous>(paths[members[here[0]].rank].text, place, names, parts_.spins,
                                                       parts_.timeout_s);
  run([](Collectives& c) { c.barrier(); });  // all ranks have opened the segments
  if (members.empty()) return nullptr;
  parts.memory = parts_.memory, parts.transport = parts_.transport, parts.context = context;
  parts.detector = parts_.detector;
  parts.thresholds = parts_.thresholds, parts.spins = parts_.spins, parts.timeout_s = parts_.timeout_s;
  return std::make_unique<Communicator>(std::move(parts));
}

std::unique_ptr<StepCommunicator> Communicator::steps(const StepSizes& sizes) {
  const int hosts = int(order_.hosts().size());
  if (!parts_.rendezvous && hosts > 1 && hosts < size)
    fail(Status::config, "%d ranks on %d hosts share no memory: steps need it inside each host", size, hosts);
  std::vector<int> each(size);
  std::iota(each.begin(), each.end(), 0);
  const Order order = parts_.rendezvous ? order_ : Order(each);  // without shared memory every rank counts as a host
  const int first = order.hosts()[order.host_of(rank)][0];
  const int64_t bytes = StepCommunicator::memory_bytes(order, rank, parts_.thresholds, sizes);
  std::unique_ptr<Segment> memory;
  Path path{};
  if (first == rank) {
    memory = std::make_unique<Segment>(bytes);
    std::strncpy(path.text, memory->path().c_str(), sizeof path.text - 1);
  }
  const std::vector<Path> paths = gather(path);
  if (first != rank) memory = std::make_unique<Segment>(paths[first].text, bytes);
  const Patience patience{parts_.spins * kPollNs, kStepYieldNs, kStepNapNs};
  return std::make_unique<StepCommunicator>(
      StepCommunicator::Parts{order, rank, parts_.rendezvous,
                              std::make_unique<Channel>(parts_.transport, next_context(),
                                                        ranks_or_all(parts_.transport_ranks, size_t(size)),
                                                        parts_.names, rank, parts_.detector, patience),
                              collectives_.get(), parts_.thresholds,
                              gather(StepCommunicator::Columns{sizes.first_column, sizes.columns})},
      std::move(*memory), sizes);
}

double Communicator::round_trip(int calls) {
  if (!parts_.rendezvous) fail(Status::config, "no memory is shared here, so there is no cache line to pass");
  std::lock_guard<std::mutex> turn(running_);
  return guarded([&] { return parts_.rendezvous->round_trip(calls); });
}

void* Communicator::allocate(int64_t bytes) {
  if (!parts_.memory) return nullptr;
  void* const data = parts_.memory->allocate(bytes);
  try {
    channel_->register_memory(data, std::max<int64_t>(bytes, 1));
  } catch (const Error&) {
    parts_.memory->release(data);
    throw;
  }
  return data;
}

void Communicator::release(void* data) {
  if (!parts_.memory) return;
  channel_->forget_memory(data);
  parts_.memory->release(data);
}

}  // namespace ckdist
