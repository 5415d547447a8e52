#include "api/communicator_api.h"
#include "bindings/communicator_handles.h"

#include <numeric>

#include "comm/timing.h"
#include "comm/transports/mpi_transport.h"
#include "comm/transports/tcp_transport.h"
#include "core/error.h"

using namespace ckdist;

struct ckdist_host_memory {
  std::shared_ptr<HostMemory> memory;
};
struct ckdist_rendezvous {
  std::unique_ptr<ShmRendezvous> rendezvous;
};
struct ckdist_operation {
  std::shared_ptr<Communicator::Operation> operation;
};

namespace {

static_assert(int(Element::f32) == ckdist_element_float32 && int(Element::bf16) == ckdist_element_bfloat16 &&
              int(Element::f16) == ckdist_element_float16 && int(Element::i32) == ckdist_element_int32 &&
              int(Element::i8) == ckdist_element_int8 && int(Element::byte) == ckdist_element_uint8);
static_assert(int(ReduceOp::sum) == ckdist_reduction_sum && int(ReduceOp::max) == ckdist_reduction_max &&
              int(ReduceOp::min) == ckdist_reduction_min);

Element element_of(int32_t e) {
  if (e < 0 || e > int32_t(Element::byte))
    fail(Status::config, "%d is not an element type; use 0 to %d", e, int(Element::byte));
  return Element(e);
}

ReduceOp op_of(int32_t op) {
  if (op < 0 || op >= kReduceOps) fail(Status::config, "%d is not a reduction; use 0 (sum), 1 (max) or 2 (min)", op);
  return ReduceOp(op);
}

std::vector<int64_t> counts_of(const int64_t* counts, int size) {
  std::vector<int64_t> result(counts, counts + size);
  int64_t total = 0;
  for (const int64_t n : result)
    if (n < 0 || __builtin_add_overflow(total, n, &total) || total > int64_t(1) << 48)
      fail(Status::config, "a count of %lld is not possible", (long long)n);
  return result;
}

template <class Body>
int collective(ckdist_communicator* c, ckdist_operation** out, Body&& make) {
  return guard([&] {
    auto body = make();
    if (out) *out = new ckdist_operation{c->communicator->begin(body)};
    else c->communicator->run(body);
  });
}

int64_t checked(int64_t n) {
  if (n < 0 || n > int64_t(1) << 44) fail(Status::config, "a size of %lld is not possible", (long long)n);
  return n;
}

}  // namespace

int ckdist_host_memory_new(const char* path, int32_t index, int32_t count, int64_t arena_bytes,
                           ckdist_host_memory** out) {
  return guard([&] {
    *out = new ckdist_host_memory{std::make_shared<HostMemory>(path ? path : "", index, count, arena_bytes)};
  });
}
const char* ckdist_host_memory_path(ckdist_host_memory* memory) { return memory->memory->path().c_str(); }
void ckdist_host_memory_free(ckdist_host_memory* memory) { delete memory; }
int ckdist_rendezvous_new(const char* path, int32_t index, int32_t count, const int32_t* ranks, int32_t spins,
                          double timeout_s, ckdist_rendezvous** out) {
  return guard([&] {
    *out = new ckdist_rendezvous{std::make_unique<ShmRendezvous>(
        path ? path : "", index, std::vector<int>(ranks, ranks + count), spins, timeout_s)};
  });
}
const char* ckdist_rendezvous_path(ckdist_rendezvous* rendezvous) { return rendezvous->rendezvous->path().c_str(); }
void ckdist_rendezvous_free(ckdist_rendezvous* rendezvous) { delete rendezvous; }

int ckdist_transport_tcp(int32_t rank, int32_t size, const int32_t* sockets, const int32_t* heartbeats,
                         const uint8_t* keys, double timeout_s, ckdist_transport** out) {
  return guard([&] {
    // Owns all descriptors before anything else can fail.
    std::deque<SealedSocket> data = SealedSocket::all(sockets, size), beats = SealedSocket::all(heartbeats, size);
    SealedSocket::seal(data, keys);
    SealedSocket::seal(beats, keys ? keys + 2 * Sealer::kKeyBytes * size : nullptr);
    auto tcp = std::make_shared<TcpTransport>(rank, size, std::move(data), timeout_s);
    tcp->heartbeat_sockets = std::move(beats);
    *out = new ckdist_transport{std::move(tcp)};
  });
}
int ckdist_transport_mpi(void* isend, void* irecv, void* test, void* iprobe, void* get_count, void* byte, void* comm,
                         int32_t rank, int32_t size, double timeout_s, ckdist_transport** out) {
  return guard([&] {
    const MpiCalls calls{reinterpret_cast<decltype(MpiCalls::isend)>(isend),
                         reinterpret_cast<decltype(MpiCalls::irecv)>(irecv),
                         reinterpret_cast<decltype(MpiCalls::test)>(test),
                         reinterpret_cast<decltype(MpiCalls::iprobe)>(iprobe),
                         reinterpret_cast<decltype(MpiCalls::get_count)>(get_count),
                         byte,
                         comm};
    *out = new ckdist_transport{std::make_shared<MpiTransport>(calls, rank, size, timeout_s)};
  });
}
int ckdist_transport_verbs(ckdist_verbs* verbs, const int32_t* heartbeats, const uint8_t* keys,
                           ckdist_transport** out) {
  return guard([&] {
    if (!verbs->transport) fail(Status::native, "the verbs transport was given away already");
    std::deque<SealedSocket>& sockets = verbs->transport->heartbeat_sockets;
    sockets = SealedSocket::all(heartbeats, verbs->transport->size);
    SealedSocket::seal(sockets, keys);
    *out = new ckdist_transport{std::move(verbs->transport)};
  });
}
int ckdist_transport_name_hosts(ckdist_transport* t, const char* const* hosts) {
  return guard([&] { t->transport->hosts.assign(hosts, hosts + t->transport->size); });
}
int ckdist_transport_time(ckdist_transport* t, int32_t peer, int64_t bytes, int32_t calls, double* out) {
  return guard([&] { *out = time_exchange(*t->transport, peer, bytes, calls); });
}
void ckdist_transport_free(ckdist_transport* transport) { delete transport; }

int ckdist_communicator_new(int32_t rank, int32_t size, const int32_t* host_of, ckdist_host_memory* memory,
                            ckdist_rendezvous* rendezvous, ckdist_transport* transport,
                            const ckdist_thresholds* thresholds, int32_t spins, double timeout_s,
                            ckdist_communicator** out) {
  return guard([&] {
    if (rank < 0 || rank >= size) fail(Status::config, "rank %d of %d is not possible", rank, size);
    Communicator::Parts parts;
    parts.rank = rank;
    parts.host_of.assign(host_of, host_of + size);
    if (memory) parts.memory = memory->memory;
    if (rendezvous) {
      parts.rendezvous = std::move(rendezvous->rendezvous);
      parts.arenas.resize(parts.rendezvous->size);
      std::iota(parts.arenas.begin(), parts.arenas.end(), 0);
    }
    if (transport) parts.transport = transport->transport;
    parts.thresholds = {thresholds->direct_bytes, thresholds->transport_direct_bytes, thresholds->leaders_bytes,
                        thresholds->chunk_bytes};
    parts.spins = spins, parts.timeout_s = timeout_s;
    *out = new ckdist_communicator{std::make_unique<Communicator>(std::move(parts))};
  });
}
void ckdist_communicator_free(ckdist_communicator* c) { delete c; }
int ckdist_communicator_check_peers(ckdist_communicator* c) {
  return guard([&] { c->communicator->check_peers(); });
}
int ckdist_communicator_abandon(ckdist_communicator* c, const char* reason) {
  return guard([&] { c->communicator->abandon(reason); });
}
int ckdist_communicator_leave(ckdist_communicator* c) {
  return guard([&] { c->communicator->leave(); });
}
const char* ckdist_communicator_transport(ckdist_communicator* c) { return c->communicator->transport().c_str(); }
int32_t ckdist_communicator_rank(ckdist_communicator* c) { return c->communicator->rank; }
int32_t ckdist_communicator_size(ckdist_communicator* c) { return c->communicator->size; }
int ckdist_communicator_split(ckdist_communicator* c, int32_t color, int32_t key, ckdist_communicator** out) {
  return guard([&] {
    auto part = c->communicator->split(color, key);
    *out = part ? new ckdist_communicator{std::move(part)} : nullptr;
  });
}
int ckdist_communicator_allocate(ckdist_communicator* c, int64_t bytes, void** out) {
  return guard([&] { *out = c->communicator->allocate(bytes); });
}
void ckdist_communicator_release(ckdist_communicator* c, void* data) { c->communicator->release(data); }

int ckdist_all_reduce(ckdist_communicator* c, const void* in, void* out, int64_t elements, int32_t element, int32_t op,
                      ckdist_operation** operation) {
  return collective(c, operation, [&] {
    return [=, n = checked(elements), e = element_of(element), o = op_of(op)](Collectives& group) {
      group.all_reduce(in, out, n, e, o);
    };
  });
}
int ckdist_reduce_scatter(ckdist_communicator* c, const void* in, void* out, const int64_t* counts, int32_t element,
                          int32_t op, ckdist_operation** operation) {
  return collective(c, operation, [&] {
    return [=, n = counts_of(counts, c->communicator->size), e = element_of(element),
            o = op_of(op)](Collectives& group) { group.reduce_scatter(in, out, n.data(), e, o); };
  });
}
int ckdist_all_gather(ckdist_communicator* c, const void* in, void* out, const int64_t* bytes,
                      ckdist_operation** operation) {
  return collective(c, operation, [&] {
    return
        [=, n = counts_of(bytes, c->communicator->size)](Collectives& group) { group.all_gather(in, out, n.data()); };
  });
}
int ckdist_all_to_all(ckdist_communicator* c, const void* in, const int64_t* send_bytes, void* out,
                      const int64_t* recv_bytes, ckdist_operation** operation) {
  return collective(c, operation, [&] {
    const int size = c->communicator->size;
    return [=, s = counts_of(send_bytes, size), r = counts_of(recv_bytes, size)](Collectives& group) {
      group.all_to_all(in, s.data(), out, r.data());
    };
  });
}
int ckdist_broadcast(ckdist_communicator* c, void* data, int64_t bytes, int32_t root, ckdist_operation** operation) {
  return collective(c, operation, [&] {
    if (root < 0 || root >= c->communicator->size)
      fail(Status::config, "root %d of %d ranks is not possible", root, c->communicator->size);
    return [=, n = checked(bytes)](Collectives& group) { group.broadcast(data, n, root); };
  });
}
int ckdist_barrier(ckdist_communicator* c, ckdist_operation** operation) {
  return collective(c, operation, [] { return [](Collectives& group) { group.barrier(); }; });
}

int ckdist_isend(ckdist_communicator* c, int32_t peer, int32_t tag, const void* data, int64_t bytes,
                 ckdist_operation** out) {
  return guard([&] { *out = new ckdist_operation{c->communicator->isend(peer, tag, data, checked(bytes))}; });
}
int ckdist_irecv(ckdist_communicator* c, int32_t peer, int32_t tag, void* data, int64_t bytes, ckdist_operation** out) {
  return guard([&] { *out = new ckdist_operation{c->communicator->irecv(peer, tag, data, checked(bytes))}; });
}
int ckdist_expose(ckdist_communicator* c, int32_t window, void* base, int64_t bytes) {
  return guard([&] { c->communicator->expose(window, base, checked(bytes)); });
}
int ckdist_iput(ckdist_communicator* c, int32_t peer, int32_t window, int64_t offset, const void* data, int64_t bytes,
                ckdist_operation** out) {
  return guard(
      [&] { *out = new ckdist_operation{c->communicator->iput(peer, window, checked(offset), data, checked(bytes))}; });
}
int ckdist_iget(ckdist_communicator* c, int32_t peer, int32_t window, int64_t offset, void* data, int64_t bytes,
                ckdist_operation** out) {
  return guard(
      [&] { *out = new ckdist_operation{c->communicator->iget(peer, window, checked(offset), data, checked(bytes))}; });
}
int ckdist_inotify(ckdist_communicator* c, int32_t peer, int32_t window, int32_t slot, ckdist_operation** out) {
  return guard([&] { *out = new ckdist_operation{c->communicator->inotify(peer, window, slot)}; });
}
int ckdist_await_notified(ckdist_communicator* c, int32_t window, int32_t slot, uint64_t count) {
  return guard([&] { c->communicator->await_notified(window, slot, count); });
}

int ckdist_operation_test(ckdist_operation* operation) {
  return guard_value([&] { return operation->operation->test(); });
}
int ckdist_operation_wait(ckdist_operation* operation) {
  return guard([&] { operation->operation->wait(); });
}
void ckdist_operation_free(ckdist_operation* operation) { delete operation; }

int ckdist_time_collective(ckdist_communicator* c, int32_t operation, void* in, void* out_buffer, int64_t elements,
                           int32_t element, int32_t calls, double* out) {
  return guard([&] {
    const Element e = element_of(element);
    const int64_t part = checked(elements) / c->communicator->size, bytes = elements * element_bytes(e);
    const std::vector<int64_t> counts(c->communicator->size, part), part_bytes(counts.size(), part * element_bytes(e));
    const auto timed = [&](int64_t in_bytes, const std::function<void(Collectives&)>& body) {
      *out = time_on_fresh_data(in, in_bytes, calls, [&] { c->communicator->run(body); });
    };
    if (operation == 0)
      timed(bytes, [&](Collectives& group) { group.all_reduce(in, out_buffer, elements, e, ReduceOp::sum); });
    else if (operation == 1)
      timed(bytes, [&](Collectives& group) { group.reduce_scatter(in, out_buffer, counts.data(), e, ReduceOp::sum); });
    else if (operation == 2)
      timed(part_bytes[0], [&](Collectives& group) { group.all_gather(in, out_buffer, part_bytes.data()); });
    else if (operation == 3)
      timed(bytes, [&](Collectives& group) { group.all_to_all(in, part_bytes.data(), out_buffer, part_bytes.data()); });
    else if (operation == 4) timed(bytes, [&](Collectives& group) { group.broadcast(in, bytes, 0); });
    else fail(Status::config, "%d is not a collective; use 0 to 4", operation);
  });
}
int ckdist_time_function(void* function, const uint64_t* words, void* in, int64_t bytes, int32_t calls, double* out) {
  return guard([&] {
    // Pointers and integers are passed in the same registers, and additional arguments do no harm.
    using Words = int (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
    const auto call = reinterpret_cast<Words>(function);
    *out = time_on_fresh_data(in, checked(bytes), calls, [&] {
      if (call(words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]))
        fail(Status::comm, "the function that is measured failed");
    });
  });
}
int ckdist_time_barrier(ckdist_communicator* c, int32_t calls, double* out) {
  return guard([&] {
    const int64_t start = now_ns();
    for (int i = 0; i < calls; i++) c->communicator->run([](Collectives& group) { group.barrier(); });
    *out = double(now_ns() - start) * 1e-9 / calls;
  });
}
int ckdist_time_round_trip(ckdist_communicator* c, int32_t calls, double* out) {
  return guard([&] { *out = c->communicator->round_trip(calls); });
}
