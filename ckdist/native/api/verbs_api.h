#pragma once
#include "api/export.h"

/* The RDMA verbs transport. Calls that can fail return a negative status; see core_api.h. One thread uses a transport
 * at a time. */
struct ckdist_verbs;

/* Tests whether verbs work in this process. Fails with the reason. */
CKDIST_EXPORT int ckdist_verbs_available(void);
/* Tests whether a port carries data: connects two queue pairs on it, and one writes to the other's memory, within
   `seconds`. */
CKDIST_EXPORT int ckdist_verbs_try(const char* device, int32_t port, int32_t gid_index, double seconds);

/* Three steps: every rank opens, sends its address to all ranks by other means, and connects with all addresses in
   rank order. All ranks must have connected before any uses the transport. timeout: maximum seconds of a wait for a
   peer. */
CKDIST_EXPORT int ckdist_verbs_open(const char* device, int32_t port, int32_t gid_index, int32_t rank, int32_t size,
                                    double timeout, struct ckdist_verbs** out);
CKDIST_EXPORT int64_t ckdist_verbs_address_bytes(int32_t size);
CKDIST_EXPORT int ckdist_verbs_address(struct ckdist_verbs* verbs, uint8_t* out);
CKDIST_EXPORT int ckdist_verbs_connect(struct ckdist_verbs* verbs, const uint8_t* addresses);
CKDIST_EXPORT void ckdist_verbs_free(struct ckdist_verbs* verbs);

/* Registers memory for many operations. It must stay mapped as long as the transport lives. */
CKDIST_EXPORT int ckdist_verbs_register(struct ckdist_verbs* verbs, void* base, int64_t bytes);

/* Operations start and return a request, 0 if already complete. Buffers must not change until the request is
   complete. */
CKDIST_EXPORT int ckdist_verbs_isend(struct ckdist_verbs* verbs, int32_t peer, int32_t tag, const void* data,
                                     int64_t bytes, uint64_t* request);
CKDIST_EXPORT int ckdist_verbs_irecv(struct ckdist_verbs* verbs, int32_t peer, int32_t tag, void* data, int64_t bytes,
                                     uint64_t* request);
CKDIST_EXPORT int ckdist_verbs_expose(struct ckdist_verbs* verbs, int32_t window, void* base, int64_t bytes);
CKDIST_EXPORT int ckdist_verbs_iput(struct ckdist_verbs* verbs, int32_t peer, int32_t window, int64_t offset,
                                    const void* data, int64_t bytes, uint64_t* request);
CKDIST_EXPORT int ckdist_verbs_iget(struct ckdist_verbs* verbs, int32_t peer, int32_t window, int64_t offset,
                                    void* data, int64_t bytes, uint64_t* request);
CKDIST_EXPORT int ckdist_verbs_inotify(struct ckdist_verbs* verbs, int32_t peer, int32_t window, int32_t slot,
                                       uint64_t* request);
CKDIST_EXPORT int ckdist_verbs_notified(struct ckdist_verbs* verbs, int32_t window, int32_t slot, uint64_t* count);
/* Waits for a request, at most for the timeout. `what` names the operation in the error. */
CKDIST_EXPORT int ckdist_verbs_wait(struct ckdist_verbs* verbs, uint64_t request, int32_t peer, const char* what);
/* Sends the reason why this rank stops to its peers. */
CKDIST_EXPORT int ckdist_verbs_abandon(struct ckdist_verbs* verbs, const char* reason);
