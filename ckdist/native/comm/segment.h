// Shared memory without a name in any file system: nothing is left behind however its users end.
#pragma once
#include <cstdint>
#include <string>

namespace ckdist {

class Segment {
 public:
  explicit Segment(int64_t bytes);                  // a new one; its pages exist once touched
  Segment(const std::string& path, int64_t bytes);  // another process's, by its path(), while that process holds it
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  void map();

  uint8_t* data_ = nullptr;
  int64_t size_;
  int fd_;
  std::string path_;
};

}  // namespace ckdist
