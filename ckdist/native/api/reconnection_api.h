/* Connections of a TCP transport that broke, and the new ones that take their place. Any thread may make these calls.
   A connection has a number: the peer's rank, for heartbeats plus the number of ranks. */
#pragma once
#include "api/export.h"

struct ckdist_transport;
struct ckdist_reconnection;
enum ckdist_broken { ckdist_broken_none = -1, ckdist_broken_closed = -2 };

/* Connections of a transport of ckdist_transport_tcp outlive a break from now on. Not after its first use. */
CKDIST_EXPORT int ckdist_reconnection_new(struct ckdist_transport* transport, struct ckdist_reconnection** out);
CKDIST_EXPORT void ckdist_reconnection_free(struct ckdist_reconnection* reconnection);
/* Waits for a connection to break. *number: ckdist_broken_none after `seconds`, ckdist_broken_closed once the transport
   is gone. */
CKDIST_EXPORT int ckdist_reconnection_next(struct ckdist_reconnection* reconnection, double seconds, int32_t* number);
/* Ends the use of a connection. Both ends do so, and exchange the numbers of bytes that they have received. */
CKDIST_EXPORT int ckdist_reconnection_pause(struct ckdist_reconnection* reconnection, int32_t number,
                                            uint64_t* received, uint64_t* attempt);
/* Continues over `socket`, and takes it. received: by the peer. It sends one byte first. mark: the peer's byte is still
   to come. Fails if another attempt began since that pause. */
CKDIST_EXPORT int ckdist_reconnection_resume(struct ckdist_reconnection* reconnection, int32_t number, int32_t socket,
                                             uint64_t received, uint64_t attempt, int32_t mark);
/* error: of errno, or 0 if the peer has ended. */
CKDIST_EXPORT int ckdist_reconnection_give_up(struct ckdist_reconnection* reconnection, int32_t number, int32_t error);
/* *out: 1 if it waits for a new connection, else 0. */
CKDIST_EXPORT int ckdist_reconnection_waits(struct ckdist_reconnection* reconnection, int32_t number, int32_t* out);
