#include "comm/failure/process.h"

#include <cstdio>
#include <cstring>

namespace ckdist {

uint64_t process_start(int pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "re");
  if (!file) return 0;
  const size_t n = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[n] = 0;
  const char* p = std::strrchr(text, ')');  // the name may contain any characters
  char state = 0;
  unsigned long long start = 0;
  if (!p || std::sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                        &state, &start) != 2)
    return 0;
  return state == 'Z' || state == 'X' ? 0 : start;
}

}  // namespace ckdist
