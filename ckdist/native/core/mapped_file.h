// A file mapped for reading that may shrink, or fail to be read, while it is mapped.
//
// Touching a page that the file no longer has raises SIGBUS. A handler that knows all mappings puts zeros there and
// marks the file as damaged; a caller that computed with its bytes calls check() before it shows the result. Other
// SIGBUS go where they went before.
//
// A file is another one when it is shorter, or when its time of writing changed and samples of its bytes did too:
// `touch`, `chmod`, `mv` and `ln` change times alone. Samples are its first, its last and 62 pages evenly between. So a
// file that is replaced in place is noticed, and so is whatever overwrites a stretch of a 63rd of it; what is missed is
// a smaller edit between two samples, and one whose author sets the time of writing back.
#pragma once
#include <signal.h>
#include <sys/stat.h>

#include <cstdint>
#include <mutex>
#include <string>

namespace ckdist {

class MappedFile {
 public:
  // Throws Error(model_file) when the file cannot be opened or mapped.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return status_.st_size; }  // when it was opened
  const uint8_t* data() const { return data_; }

  // Throws Error(model_file) unless every byte that was read so far is one that the file had when it was opened.
  void check() const;
  // Parts of the file still come in, so its time of writing says nothing: check() asks for its length alone.
  void expect_writes() { written_to_ = true; }
  // From now on check() throws with this message: the file holds what no model does. The first one stays.
  void reject(const std::string& why) const;
  // Asks the system to begin reading these bytes.
  void will_need(int64_t offset, int64_t bytes) const;
  // Takes these bytes' pages out of this process's memory, and, with `cache`, out of the system's where no other
  // process maps them. They can still be read. `offset` is a multiple of the page size.
  void give_back(int64_t offset, int64_t bytes, bool cache) const;

 private:
  struct Guard;
  // Of the samples, as the file has them now. Throws Error(model_file) where it cannot be read.
  uint64_t checksum() const;
  static void on_bus_error(int number, siginfo_t* info, void* context);
  static void watch_bus_errors();

  std::string path_;
  int descriptor_ = -1;
  struct stat status_;
  bool written_to_ = false;  // while it is mapped, as it should be
  uint64_t checksum_ = 0;    // when it was opened
  const uint8_t* data_ = nullptr;
  Guard* guard_ = nullptr;
  mutable std::mutex rejecting_;
  mutable std::string rejected_;  // why; empty where it is not
};

}  // namespace ckdist
