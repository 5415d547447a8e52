// Memory that the processes of one host share. It has no name in any file system: no limit of /dev/shm applies, and
// nothing is left behind however its users end.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace ckdist {

class Segment {
 public:
  static constexpr int64_t kHugePage = 2 << 20;

  // Zeros, of which no page exists until it is touched. `reserved`: explicit huge pages, of which there must be enough.
  explicit Segment(int64_t bytes, bool reserved = false);
  // One that another rank made, while that rank holds it. Ranks that are threads of one process get the same addresses.
  Segment(const std::string& path, int64_t bytes);

  uint8_t* data() const { return mapping_->data; }
  // Makes huge pages of what was touched, where that is possible: the system's setting for shared memory, which usually
  // forbids them, does not apply to those who ask.
  static void collapse(uint8_t* begin, int64_t bytes);

  int64_t size() const { return mapping_->bytes; }
  const std::string& path() const { return mapping_->path; }  // by which others open it

 private:
  struct Mapping {
    std::string path;
    uint8_t* data = nullptr;
    int64_t bytes = 0;
    int fd = -1;  // held by the maker, for the others to open
    ~Mapping();
  };
  void map(int fd, int64_t bytes);
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace ckdist
