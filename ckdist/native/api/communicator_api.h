#pragma once
#include "api/export.h"

enum ckdist_element {
  ckdist_element_float32,
  ckdist_element_bfloat16,
  ckdist_element_float16,
  ckdist_element_int32,
  ckdist_element_int8,
  ckdist_element_uint8
};
enum ckdist_reduction { ckdist_reduction_sum, ckdist_reduction_max, ckdist_reduction_min };

struct ckdist_host_memory;
struct ckdist_rendezvous;
struct ckdist_transport;
struct ckdist_communicator;
struct ckdist_operation;

struct ckdist_thresholds {
  int64_t direct_bytes, transport_direct_bytes, leaders_bytes, chunk_bytes;
};

/* Shared memory of the ranks of one host. The first rank passes a null path. The others pass the result of its
   ..._path, while it holds the object. */
CKDIST_EXPORT int ckdist_host_memory_new(const char* path, int32_t index, int32_t count, int64_t arena_bytes,
                                         struct ckdist_host_memory** out);
CKDIST_EXPORT const char* ckdist_host_memory_path(struct ckdist_host_memory* memory);
CKDIST_EXPORT void ckdist_host_memory_free(struct ckdist_host_memory* memory);
CKDIST_EXPORT int ckdist_rendezvous_new(const char* path, int32_t index, int32_t count, const int32_t* ranks,
                                        int32_t spins, double timeout_s, struct ckdist_rendezvous** out);
CKDIST_EXPORT const char* ckdist_rendezvous_path(struct ckdist_rendezvous* rendezvous);
CKDIST_EXPORT void ckdist_rendezvous_free(struct ckdist_rendezvous* rendezvous);

/* Transports between ranks of any hosts. sockets, heartbeats: a connected and authenticated one per rank, -1 for the
   rank itself. The transport takes ownership. keys: what seals each of them (sealer_api.h), those of `heartbeats` after
   those of `sockets`; null: nothing is sealed. */
CKDIST_EXPORT int ckdist_transport_tcp(int32_t rank, int32_t size, const int32_t* sockets, const int32_t* heartbeats,
                                       const uint8_t* keys, double timeout_s, struct ckdist_transport** out);
/* Addresses of MPI_Isend, MPI_Irecv, MPI_Test, MPI_Iprobe and MPI_Get_count, and the values of MPI_BYTE and of a
 * communicator. */
CKDIST_EXPORT int ckdist_transport_mpi(void* isend, void* irecv, void* test, void* iprobe, void* get_count, void* byte,
                                       void* comm, int32_t rank, int32_t size, double timeout_s,
                                       struct ckdist_transport** out);
/* Takes over a connected verbs transport (verbs_api.h). The handle is empty afterwards and must still be freed. */
struct ckdist_verbs;
CKDIST_EXPORT int ckdist_transport_verbs(struct ckdist_verbs* verbs, const int32_t* heartbeats, const uint8_t* keys,
                                         struct ckdist_transport** out);
/* Sets the machine name of each rank, for errors. Call it before the transport is used. */
CKDIST_EXPORT int ckdist_transport_name_hosts(struct ckdist_transport* transport, const char* const* hosts);
/* Seconds of one exchange of `bytes` with `peer`: the least of `calls`. The peer must make the same call. Not after
   a communicator has the transport. */
CKDIST_EXPORT int ckdist_transport_time(struct ckdist_transport* transport, int32_t peer, int64_t bytes, int32_t calls,
                                        double* out);
CKDIST_EXPORT void ckdist_transport_free(struct ckdist_transport* transport);

/* host_of: a number per rank, equal for ranks of one host. memory and rendezvous may both be null; the communicator
   takes over the rendezvous. transport may be null. Memory without a rendezvous is used only by this rank;
   allocations in it are registered with the transport once. The caller may free the memory and the transport while
   communicators still use them. */
CKDIST_EXPORT int ckdist_communicator_new(int32_t rank, int32_t size, const int32_t* host_of,
                                          struct ckdist_host_memory* memory, struct ckdist_rendezvous* rendezvous,
                                          struct ckdist_transport* transport,
                                          const struct ckdist_thresholds* thresholds, int32_t spins, double timeout_s,
                                          struct ckdist_communicator** out);
CKDIST_EXPORT void ckdist_communicator_free(struct ckdist_communicator* communicator);
CKDIST_EXPORT int ckdist_communicator_check_peers(struct ckdist_communicator* communicator);
CKDIST_EXPORT int ckdist_communicator_abandon(struct ckdist_communicator* communicator, const char* reason);
CKDIST_EXPORT int ckdist_communicator_leave(struct ckdist_communicator* communicator);
CKDIST_EXPORT const char* ckdist_communicator_transport(struct ckdist_communicator* communicator);
/* *out is null for a negative color. */
CKDIST_EXPORT int ckdist_communicator_split(struct ckdist_communicator* communicator, int32_t color, int32_t key,
                                            struct ckdist_communicator** out);
CKDIST_EXPORT int32_t ckdist_communicator_rank(struct ckdist_communicator* communicator);
CKDIST_EXPORT int32_t ckdist_communicator_size(struct ckdist_communicator* communicator);
/* *out is null if the ranks share no memory: then use any other memory. */
CKDIST_EXPORT int ckdist_communicator_allocate(struct ckdist_communicator* communicator, int64_t bytes, void** out);
CKDIST_EXPORT void ckdist_communicator_release(struct ckdist_communicator* communicator, void* data);

/* Collectives. With `out_operation` they return at once, else when they are complete. Buffers must live until
 * completion; counts are copied. */
CKDIST_EXPORT int ckdist_all_reduce(struct ckdist_communicator* communicator, const void* in, void* out,
                                    int64_t elements, int32_t element, int32_t op,
                                    struct ckdist_operation** out_operation);
CKDIST_EXPORT int ckdist_reduce_scatter(struct ckdist_communicator* communicator, const void* in, void* out,
                                        const int64_t* counts, int32_t element, int32_t op,
                                        struct ckdist_operation** out_operation);
CKDIST_EXPORT int ckdist_all_gather(struct ckdist_communicator* communicator, const void* in, void* out,
                                    const int64_t* bytes, struct ckdist_operation** out_operation);
CKDIST_EXPORT int ckdist_all_to_all(struct ckdist_communicator* communicator, const void* in, const int64_t* send_bytes,
                                    void* out, const int64_t* recv_bytes, struct ckdist_operation** out_operation);
CKDIST_EXPORT int ckdist_broadcast(struct ckdist_communicator* communicator, void* data, int64_t bytes, int32_t root,
                                   struct ckdist_operation** out_operation);
CKDIST_EXPORT int ckdist_barrier(struct ckdist_communicator* communicator, struct ckdist_operation** out_operation);

CKDIST_EXPORT int ckdist_isend(struct ckdist_communicator* communicator, int32_t peer, int32_t tag, const void* data,
                               int64_t bytes, struct ckdist_operation** out);
CKDIST_EXPORT int ckdist_irecv(struct ckdist_communicator* communicator, int32_t peer, int32_t tag, void* data,
                               int64_t bytes, struct ckdist_operation** out);
CKDIST_EXPORT int ckdist_expose(struct ckdist_communicator* communicator, int32_t window, void* base, int64_t bytes);
CKDIST_EXPORT int ckdist_iput(struct ckdist_communicator* communicator, int32_t peer, int32_t window, int64_t offset,
                              const void* data, int64_t bytes, struct ckdist_operation** out);
CKDIST_EXPORT int ckdist_iget(struct ckdist_communicator* communicator, int32_t peer, int32_t window, int64_t offset,
                              void* data, int64_t bytes, struct ckdist_operation** out);
CKDIST_EXPORT int ckdist_inotify(struct ckdist_communicator* communicator, int32_t peer, int32_t window, int32_t slot,
                                 struct ckdist_operation** out);
CKDIST_EXPORT int ckdist_await_notified(struct ckdist_communicator* communicator, int32_t window, int32_t slot,
                                        uint64_t count);

/* Returns 1 if complete, else 0. */
CKDIST_EXPORT int ckdist_operation_test(struct ckdist_operation* operation);
CKDIST_EXPORT int ckdist_operation_wait(struct ckdist_operation* operation);
CKDIST_EXPORT void ckdist_operation_free(struct ckdist_operation* operation);

/* Measurements; all ranks call together.
   ckdist_time_collective: seconds of one collective (operation: 0 all_reduce, 1 reduce_scatter, 2 all_gather, 3
   all_to_all, 4 broadcast from rank 0; equal parts, `elements` in the larger buffer). `in` is rewritten before every
   call; the time of rewriting is subtracted.
   ckdist_time_function: the same for any function of up to eight pointers and integers that returns 0.
   ckdist_time_barrier: seconds of one barrier.
   ckdist_time_round_trip: seconds of a cache line from rank 0 to rank 1 of one host and back. */
CKDIST_EXPORT int ckdist_time_collective(struct ckdist_communicator* communicator, int32_t operation, void* in,
                                         void* out_buffer, int64_t elements, int32_t element, int32_t calls,
                                         double* out);
CKDIST_EXPORT int ckdist_time_function(void* function, const uint64_t* words, void* in, int64_t bytes, int32_t calls,
                                       double* out);
CKDIST_EXPORT int ckdist_time_barrier(struct ckdist_communicator* communicator, int32_t calls, double* out);
CKDIST_EXPORT int ckdist_time_round_trip(struct ckdist_communicator* communicator, int32_t calls, double* out);
