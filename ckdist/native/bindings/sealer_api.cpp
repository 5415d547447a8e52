#include "api/sealer_api.h"
#include "comm/transports/sealer.h"
#include "core/error.h"

using namespace ckdist;

struct ckdist_sealer {
  Sealer sealer;
};

int ckdist_sealer_new(const uint8_t* keys, ckdist_sealer** out) {
  return guard([&] { *out = new ckdist_sealer{Sealer(keys)}; });
}
void ckdist_sealer_free(ckdist_sealer* sealer) { delete sealer; }
int ckdist_seal(ckdist_sealer* sealer, const uint8_t* data, int64_t bytes, uint8_t* record) {
  return guard([&] {
    if (bytes < 1 || bytes > Sealer::kMost) fail(Status::native, "a record of %lld bytes", (long long)bytes);
    sealer->sealer.seal(data, bytes, record);
  });
}
int ckdist_unseal(ckdist_sealer* sealer, const uint8_t* record, int64_t bytes, uint8_t* data) {
  return guard([&] {
    if (!sealer->sealer.unseal(record, bytes, data))
      fail(Status::comm, "it sent bytes that are not sealed with the keys of this job");
  });
}
int ckdist_new_key_pair(uint8_t* private_key, uint8_t* public_key) {
  return guard([&] { new_key_pair(private_key, public_key); });
}
int ckdist_agreed_key(const uint8_t* private_key, const uint8_t* peers_public_key, uint8_t* out) {
  return guard([&] { agreed_key(private_key, peers_public_key, out); });
}
