/* Encryption between hosts (comm/transports/sealer.h), for messages at start-up. Keys are 16 bytes to send and 16 to
   receive. A record has 20 bytes more than its data, which has 1 to 65536 bytes. */
#pragma once
#include "api/export.h"

struct ckdist_sealer;
CKDIST_EXPORT int ckdist_sealer_new(const uint8_t* keys, struct ckdist_sealer** out);
CKDIST_EXPORT void ckdist_sealer_free(struct ckdist_sealer* sealer);
CKDIST_EXPORT int ckdist_seal(struct ckdist_sealer* sealer, const uint8_t* data, int64_t bytes, uint8_t* record);
/* `bytes`: of the record. Fails unless it is the peer's next record. */
CKDIST_EXPORT int ckdist_unseal(struct ckdist_sealer* sealer, const uint8_t* record, int64_t bytes, uint8_t* data);
/* X25519: a new pair of keys, and the key that two sides agree on. All have 32 bytes. */
CKDIST_EXPORT int ckdist_new_key_pair(uint8_t* private_key, uint8_t* public_key);
CKDIST_EXPORT int ckdist_agreed_key(const uint8_t* private_key, const uint8_t* peers_public_key, uint8_t* out);
