// OpenSSL's libcrypto, loaded when it is first needed: only jobs over several hosts use it.
#pragma once
#include <cstddef>

namespace ckdist {

struct evp_cipher;
struct evp_cipher_context;
struct evp_digest;
struct evp_key;
struct evp_key_context;

// name, result and arguments of EVP_... calls, as in OpenSSL 1.1.1 and 3
// clang-format off
#define CKDIST_CRYPTO_CALLS(X) \
  X(CIPHER_CTX_new, evp_cipher_context*, ()) \
  X(CIPHER_CTX_free, void, (evp_cipher_context*)) \
  X(CIPHER_CTX_ctrl, int, (evp_cipher_context*, int type, int number, void* data)) \
  X(aes_128_gcm, const evp_cipher*, ()) \
  X(EncryptInit_ex, int, (evp_cipher_context*, const evp_cipher*, void*, const unsigned char*, const unsigned char*)) \
  X(EncryptUpdate, int, (evp_cipher_context*, unsigned char* out, int* written, const unsigned char* in, int bytes)) \
  X(EncryptFinal_ex, int, (evp_cipher_context*, unsigned char* out, int* written)) \
  X(DecryptInit_ex, int, (evp_cipher_context*, const evp_cipher*, void*, const unsigned char*, const unsigned char*)) \
  X(DecryptUpdate, int, (evp_cipher_context*, unsigned char* out, int* written, const unsigned char* in, int bytes)) \
  X(DecryptFinal_ex, int, (evp_cipher_context*, unsigned char* out, int* written)) \
  X(sha256, const evp_digest*, ()) \
  X(PKEY_new_raw_private_key, evp_key*, (int type, void*, const unsigned char*, size_t)) \
  X(PKEY_new_raw_public_key, evp_key*, (int type, void*, const unsigned char*, size_t)) \
  X(PKEY_get_raw_public_key, int, (const evp_key*, unsigned char*, size_t*)) \
  X(PKEY_free, void, (evp_key*)) \
  X(PKEY_CTX_new, evp_key_context*, (evp_key*, void*)) \
  X(PKEY_CTX_free, void, (evp_key_context*)) \
  X(PKEY_derive_init, int, (evp_key_context*)) \
  X(PKEY_derive_set_peer, int, (evp_key_context*, evp_key*)) \
  X(PKEY_derive, int, (evp_key_context*, unsigned char*, size_t*))
// clang-format on

struct CryptoLibrary {
#define CKDIST_CRYPTO_POINTER(name, result, arguments) result(*name) arguments = nullptr;
  CKDIST_CRYPTO_CALLS(CKDIST_CRYPTO_POINTER)
#undef CKDIST_CRYPTO_POINTER
  unsigned char* (*hmac)(const evp_digest*, const void* key, int key_bytes, const unsigned char* data, size_t bytes,
                         unsigned char* out, unsigned* written) = nullptr;
  int (*random)(unsigned char* out, int bytes) = nullptr;
};

// Throws Error(Status::config) if this host has no libcrypto.
const CryptoLibrary& crypto_library();

// A key of X25519 and the key that two sides agree on; all 32 bytes.
void new_key_pair(unsigned char* private_key, unsigned char* public_key);
void agreed_key(const unsigned char* private_key, const unsigned char* peers_public_key, unsigned char* out);

}  // namespace ckdist
