// Memory that the processes of one host share. It has no name in any file system: the limit of /dev/shm does not apply,
// and nothing is left behind if its users crash.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace ckdist {

class Segment {
 public:
  static constexpr int64_t kHugePage = 2 << 20;

  // Creates a segment of zeros without allocated pages. `reserved`: with explicit huge pages; enough of them must be
  // free.
  explicit Segment(int64_t bytes, bool reserved = false);
  // Maps the segment of another rank, while that rank holds it. Ranks that are threads of one process get the same
  // addresses.
  Segment(const std::string& path, int64_t bytes);

  uint8_t* data() const { return mapping_->data; }
  // Converts touched pages to huge pages, if possible. The system's setting for shared memory usually forbids huge
  // pages, but does not apply to explicit requests.
  static void collapse(uint8_t* begin, int64_t bytes);
  // Gives unused memory huge pages of zeros on this thread's node, if possible. If not, each small page lies on the
  // node of the thread that uses it first.
  static void place_huge(uint8_t* begin, int64_t bytes);

  int64_t size() const { return mapping_->bytes; }
  const std::string& path() const { return mapping_->path; }  // for mapping it in other processes

 private:
  struct Mapping {
    std::string path;
    uint8_t* data = nullptr;
    int64_t bytes = 0;
    int fd = -1;  // of the creator, which other processes open
    ~Mapping();
  };
  struct Registry;
  static Registry& registry();
  void map(int fd, int64_t bytes);
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace ckdist
