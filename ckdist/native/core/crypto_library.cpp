#include "core/crypto_library.h"

#include <dlfcn.h>

#include <memory>

#include "core/error.h"

namespace ckdist {

namespace {

constexpr int kX25519 = 1034;  // EVP_PKEY_X25519
constexpr size_t kKeyBytes = 32;

struct FreesKey {
  void operator()(evp_key* key) const { crypto_library().PKEY_free(key); }
  void operator()(evp_key_context* context) const { crypto_library().PKEY_CTX_free(context); }
};
using Key = std::unique_ptr<evp_key, FreesKey>;

Key private_key_of(const unsigned char* bytes) {
  Key key(crypto_library().PKEY_new_raw_private_key(kX25519, nullptr, bytes, kKeyBytes));
  if (!key) fail(Status::native, "libcrypto made no key of X25519");
  return key;
}

}  // namespace

const CryptoLibrary& crypto_library() {
  static const CryptoLibrary library = [] {
    void* handle = nullptr;
    for (const char* const name : {"libcrypto.so.3", "libcrypto.so.1.1"})
      if (!handle) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
      fail(Status::config,
           "traffic between hosts cannot be encrypted: libcrypto does not load (%s); install OpenSSL (Debian and "
           "Ubuntu: apt-get install libssl3), or start all ranks with --encrypt never on a closed network",
           dlerror());
    CryptoLibrary found;
    const auto load = [&](auto& pointer, const char* name) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(dlsym(handle, name));
      if (!pointer) fail(Status::config, "libcrypto has no %s: it is too old; install OpenSSL 1.1.1 or 3", name);
    };
#define CKDIST_CRYPTO_LOAD(name, result, arguments) load(found.name, "EVP_" #name);
    CKDIST_CRYPTO_CALLS(CKDIST_CRYPTO_LOAD)
#undef CKDIST_CRYPTO_LOAD
    load(found.hmac, "HMAC");
    load(found.random, "RAND_bytes");
    return found;
  }();
  return library;
}

void new_key_pair(unsigned char* private_key, unsigned char* public_key) {
  const CryptoLibrary& crypto = crypto_library();
  size_t bytes = kKeyBytes;
  if (crypto.random(private_key, int(kKeyBytes)) != 1) fail(Status::native, "libcrypto has no random bytes");
  if (crypto.PKEY_get_raw_public_key(private_key_of(private_key).get(), public_key, &bytes) != 1 || bytes != kKeyBytes)
    fail(Status::native, "libcrypto gave no public key of X25519");
}

void agreed_key(const unsigned char* private_key, const unsigned char* peers_public_key, unsigned char* out) {
  const CryptoLibrary& crypto = crypto_library();
  const Key own = private_key_of(private_key);
  const Key peer(crypto.PKEY_new_raw_public_key(kX25519, nullptr, peers_public_key, kKeyBytes));
  const std::unique_ptr<evp_key_context, FreesKey> context(crypto.PKEY_CTX_new(own.get(), nullptr));
  size_t bytes = kKeyBytes;
  if (!peer || !context || crypto.PKEY_derive_init(context.get()) != 1 ||
      crypto.PKEY_derive_set_peer(context.get(), peer.get()) != 1 ||
      crypto.PKEY_derive(context.get(), out, &bytes) != 1 || bytes != kKeyBytes)
    fail(Status::comm, "a rank sent something that is not a public key");
}

}  // namespace ckdist
