#ifndef CKDIST_API_VERBS_H
#define CKDIST_API_VERBS_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* The RDMA verbs transport. Calls that can fail return a negative status; see core.h. One thread uses a transport at a
 * time. */
struct ckdist_verbs;

/* Can verbs work in this process? Fails with the reason. */
CKDIST_EXPORT int ckdist_verbs_available(void);
/* Does a port carry data? Two queue pairs on it are connected to one another, and one writes to the other's memory,
 * within `seconds`. */
CKDIST_EXPORT int ckdist_verbs_try(const char* device, int32_t port, int32_t gid_index, double seconds);

/* Three steps: every rank opens, gives its address to all by other means, and connects with all ranks' addresses in
   rank order; all have connected before any uses the transport. timeout: seconds that any wait for a peer may take. */
CKDIST_EXPORT int ckdist_verbs_open(const char* device, int32_t port, int32_t gid_index, int32_t rank, int32_t size,
                                    double timeout, struct ckdist_verbs** out);
CKDIST_EXPORT int64_t ckdist_verbs_address_bytes(int32_t size);
CKDIST_EXPORT int ckdist_verbs_address(struct ckdist_verbs* verbs, uint8_t* out);
CKDIST_EXPORT int ckdist_verbs_connect(struct ckdist_verbs* verbs, const uint8_t* addresses);
CKDIST_EXPORT void ckdist_verbs_free(struct ckdist_verbs* verbs);

/* Memory that many operations will use; it stays mapped as long as the transport lives. */
CKDIST_EXPORT int ckdist_verbs_register(struct ckdist_verbs* verbs, void* base, int64_t bytes);

/* Operations begin and give a request, 0 when complete already; buffers stay as they are until the request is complete.
 */
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
/* Waits until a request is complete, at most the timeout. `what` names the operation in the error. */
CKDIST_EXPORT int ckdist_verbs_wait(struct ckdist_verbs* verbs, uint64_t request, int32_t peer, const char* what);
/* Tells the peers why this rank gives up. */
CKDIST_EXPORT int ckdist_verbs_abandon(struct ckdist_verbs* verbs, const char* reason);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
