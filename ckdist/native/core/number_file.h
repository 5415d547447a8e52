// Reads numbers from the kernel's small text files.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace ckdist {

// The number after `key` in a file of "key number" lines, or the first number of the file if key is empty. Else
// `absent`.
inline int64_t read_number(const std::string& path, const std::string& key, int64_t absent) {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return absent;
  char line[256];
  int64_t result = absent;
  while (std::fgets(line, sizeof line, file)) {
    if (std::strncmp(line, key.c_str(), key.size()) != 0) continue;
    char* end = nullptr;
    const long long value = std::strtoll(line + key.size(), &end, 10);
    if (end != line + key.size() && value >= 0) result = value;
    break;
  }
  std::fclose(file);
  return result;
}

}  // namespace ckdist
