// Encrypts and authenticates the bytes between two ranks, in records: AES-128-GCM with a counter as the nonce.
//
// A record is the number of its bytes (uint32, little-endian, authenticated), the encrypted bytes, and a tag. Both ends
// count the records of each direction, so a record that was changed, repeated, reordered, left out or made by others
// has a wrong tag. After kRecordsPerKey records the next key is the HMAC-SHA256 of the last one.
#pragma once
#include <cstdint>
#include <memory>

#include "core/crypto_library.h"

namespace ckdist {

class Sealer {
 public:
  static constexpr int64_t kKeyBytes = 16, kMost = 64 << 10;  // kMost: data bytes of a record
  static constexpr int64_t kHead = sizeof(uint32_t), kTag = 16, kExtra = kHead + kTag;
  static constexpr uint64_t kRecordsPerKey = 1 << 20;  // 64 GiB

  // keys: one to send and one to receive.
  explicit Sealer(const uint8_t* keys);

  // Writes a record of bytes + kExtra bytes. `data` and `record` must not overlap. 0 < bytes <= kMost.
  void seal(const uint8_t* data, int64_t bytes, uint8_t* record);
  // Bytes of the data of a record with this head, or -1 if no record has it.
  static int64_t data_bytes(const uint8_t* head);
  // Writes the data of a whole record. Returns false if its tag is wrong; then `data` holds nothing of use.
  [[nodiscard]] bool unseal(const uint8_t* record, int64_t bytes, uint8_t* data);

 private:
  struct FreesContext {
    void operator()(evp_cipher_context* context) const { crypto_library().CIPHER_CTX_free(context); }
  };
  struct Direction {
    std::unique_ptr<evp_cipher_context, FreesContext> context;
    uint8_t key[kKeyBytes];
    uint64_t records = 0;
  };
  template <class Init>
  void begin(Direction& direction, Init init);  // of the next record

  const CryptoLibrary& crypto_;
  Direction out_, in_;
};

}  // namespace ckdist
