// The keys of sealed records change without a message, and both ends agree on a key.
#include <cstring>
#include <vector>

#include <doctest/doctest.h>

#include "comm/transports/sealer.h"

using namespace ckdist;

TEST_CASE("both ends change their keys after the same record") {
  std::vector<uint8_t> keys(2 * Sealer::kKeyBytes), others(keys.size());
  for (size_t i = 0; i < keys.size(); i++) keys[i] = uint8_t(i), others[i ^ Sealer::kKeyBytes] = uint8_t(i);
  Sealer here(keys.data()), there(others.data());
  uint8_t record[8 + Sealer::kExtra], data[8];
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < Sealer::kRecordsPerKey + 3; i++) {
    here.seal(reinterpret_cast<const uint8_t*>(&i), sizeof i, record);
    wrong += !there.unseal(record, sizeof record, data) || std::memcmp(data, &i, sizeof i) != 0;
  }
  CHECK(wrong == 0);
  here.seal(data, sizeof data, record);
  record[Sealer::kHead] ^= 1;
  CHECK_FALSE(there.unseal(record, sizeof record, data));
}

TEST_CASE("two ends agree on a key") {
  uint8_t here[2][32], there[2][32], keys[2][32];
  new_key_pair(here[0], here[1]);
  new_key_pair(there[0], there[1]);
  agreed_key(here[0], there[1], keys[0]);
  agreed_key(there[0], here[1], keys[1]);
  CHECK(std::memcmp(keys[0], keys[1], 32) == 0);
  CHECK(std::memcmp(keys[0], here[1], 32) != 0);
  CHECK_THROWS(agreed_key(here[0], std::vector<uint8_t>(32).data(), keys[0]));  // a key that makes any result zero
}
