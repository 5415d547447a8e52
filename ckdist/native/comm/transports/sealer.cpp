#include "comm/transports/sealer.h"

#include <cstring>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_GCM_GET_TAG and EVP_CTRL_GCM_SET_TAG
constexpr unsigned char kNextKey[] = "ckdist next key";

void check(int result) {
  if (result != 1) fail(Status::native, "libcrypto refused AES-128-GCM");
}
}  // namespace

Sealer::Sealer(const uint8_t* keys) : crypto_(crypto_library()) {
  for (Direction* const direction : {&out_, &in_}) {
    direction->context.reset(crypto_.CIPHER_CTX_new());
    if (!direction->context) fail(Status::native, "libcrypto has no memory");
    std::memcpy(direction->key, keys + (direction == &in_ ? kKeyBytes : 0), kKeyBytes);
  }
  check(crypto_.EncryptInit_ex(out_.context.get(), crypto_.aes_128_gcm(), nullptr, out_.key, nullptr));
  check(crypto_.DecryptInit_ex(in_.context.get(), crypto_.aes_128_gcm(), nullptr, in_.key, nullptr));
}

template <class Init>
void Sealer::begin(Direction& direction, Init init) {
  const bool next = direction.records > 0 && direction.records % kRecordsPerKey == 0;
  if (next) {
    uint8_t digest[32];
    if (!crypto_.hmac(crypto_.sha256(), direction.key, int(kKeyBytes), kNextKey, sizeof kNextKey - 1, digest, nullptr))
      fail(Status::native, "libcrypto refused HMAC-SHA256");
    std::memcpy(direction.key, digest, kKeyBytes);
  }
  uint8_t nonce[12] = {};
  std::memcpy(nonce + 4, &direction.records, sizeof direction.records);
  direction.records++;
  check(init(direction.context.get(), nullptr, nullptr, next ? direction.key : nullptr, nonce));
}

void Sealer::seal(const uint8_t* data, int64_t bytes, uint8_t* record) {
  const uint32_t head = uint32_t(bytes);
  evp_cipher_context* const context = out_.context.get();
  int written = 0;
  begin(out_, crypto_.EncryptInit_ex);
  std::memcpy(record, &head, sizeof head);
  check(crypto_.EncryptUpdate(context, nullptr, &written, record, int(kHead)));
  check(crypto_.EncryptUpdate(context, record + kHead, &written, data, int(bytes)));
  check(crypto_.EncryptFinal_ex(context, record + kHead + bytes, &written));
  check(crypto_.CIPHER_CTX_ctrl(context, kGetTag, int(kTag), record + kHead + bytes));
}

int64_t Sealer::data_bytes(const uint8_t* head) {
  uint32_t bytes;
  std::memcpy(&bytes, head, sizeof bytes);
  return bytes > 0 && bytes <= kMost ? int64_t(bytes) : -1;
}

bool Sealer::unseal(const uint8_t* record, int64_t bytes, uint8_t* data) {
  evp_cipher_context* const context = in_.context.get();
  int written = 0;
  if (bytes <= kExtra || data_bytes(record) != bytes - kExtra) return false;
  bytes -= kExtra;
  begin(in_, crypto_.DecryptInit_ex);
  check(crypto_.DecryptUpdate(context, nullptr, &written, record, int(kHead)));
  check(crypto_.DecryptUpdate(context, data, &written, record + kHead, int(bytes)));
  check(crypto_.CIPHER_CTX_ctrl(context, kSetTag, int(kTag), const_cast<uint8_t*>(record + kHead + bytes)));
  return crypto_.DecryptFinal_ex(context, data + bytes, &written) == 1;
}

}  // namespace ckdist
