// A file mapped for reading that may shrink, or become unreadable, while it is mapped.
//
// Access to a page that the file no longer has raises SIGBUS. A handler that knows all mappings puts zeros there and
// marks the file as damaged. A caller that computed with its bytes must call check() before it publishes the result.
// Other SIGBUS signals go to the earlier handler.
//
// A file has changed if it is shorter, or if its modification time and samples of its bytes changed: `touch`, `chmod`,
// `mv` and `ln` change only times. The samples are the first page, the last page, and 62 pages evenly between. So a
// file that is replaced in place is detected, and so is any overwritten range of 1/63 of the file. Two changes are not
// detected: a smaller edit between two samples, and an edit with a restored modification time.
#pragma once
#include <signal.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

namespace ckdist {

class MappedFile {
 public:
  // Throws Error(model_file) if the file cannot be opened or mapped.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return status_.st_size; }  // size when it was opened
  const uint8_t* data() const { return data_; }

  // Throws Error(model_file) if bytes that were read differ from the file's bytes at opening.
  void check() const;
  // Parts of the file are still being written, so its modification time means nothing: check() checks only its length.
  void expect_writes() { written_to_ = true; }
  // Makes every later check() throw this message, because the file has invalid content. The first message is kept.
  void reject(const std::string& why) const;
  // True if bytes read as zeros because of an input error, or the file was rejected. Takes no lock.
  bool has_failed() const;
  // Asks the system to begin reading these bytes.
  void will_need(int64_t offset, int64_t bytes) const;
  // Removes the pages of these bytes from this process's memory and, with `cache`, from the page cache if no other
  // process maps them. They can still be read. `offset` is a multiple of the page size.
  void give_back(int64_t offset, int64_t bytes, bool cache) const;

 private:
  struct Guard;
  // Checksum of the samples as the file has them now. Throws Error(model_file) if it cannot be read.
  uint64_t checksum() const;
  static void on_bus_error(int number, siginfo_t* info, void* context);
  static void watch_bus_errors();

  std::string path_;
  int descriptor_ = -1;
  struct stat status_;
  bool written_to_ = false;  // the file is written while it is mapped, as expected
  uint64_t checksum_ = 0;    // at opening
  const uint8_t* data_ = nullptr;
  Guard* guard_ = nullptr;
  mutable std::mutex rejecting_;
  mutable std::atomic<bool> is_rejected_{false};
  mutable std::string rejected_;  // the reason, or empty
};

}  // namespace ckdist
