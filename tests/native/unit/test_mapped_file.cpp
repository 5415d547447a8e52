// A mapped file that shrinks or changes gives an error afterwards, never a signal.
#include <fcntl.h>
#include <unistd.h>

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/mapped_file.h"

using namespace ckdist;

namespace {

struct File {
  File() {
    const int fd = mkstemp(path.data());
    const std::vector<char> bytes(1 << 20, 'x');
    REQUIRE(write(fd, bytes.data(), bytes.size()) == int64_t(bytes.size()));
    close(fd);
  }
  ~File() { unlink(path.c_str()); }
  std::string path = "/tmp/ckdist-mapped-XXXXXX";
};

int64_t sum(const MappedFile& file) {
  int64_t total = 0;
  for (int64_t i = 0; i < file.size(); i += 4096) total += file.data()[i];
  return total;
}

}  // namespace

TEST_CASE("a file that stays as it was is no error") {
  File file;
  const MappedFile mapped(file.path);
  CHECK(sum(mapped) == 256 * 'x');
  mapped.give_back(0, mapped.size(), true);
  CHECK(sum(mapped) == 256 * 'x');
  CHECK_NOTHROW(mapped.check());
}

TEST_CASE("pages that a file has lost read as zeros, and check names the file") {
  File file;
  const MappedFile mapped(file.path);
  REQUIRE(truncate(file.path.c_str(), 4096) == 0);
  CHECK(sum(mapped) == 'x');
  CHECK_THROWS_AS(mapped.check(), Error);
}

TEST_CASE("a file that was written over is noticed") {
  File file;
  const MappedFile mapped(file.path);
  const int fd = open(file.path.c_str(), O_WRONLY);
  const std::vector<char> other(1 << 16, 'y');
  REQUIRE(pwrite(fd, other.data(), other.size(), 1 << 18) == int64_t(other.size()));
  close(fd);
  CHECK_THROWS_AS(mapped.check(), Error);
}

TEST_CASE("what cannot be opened is an error") { CHECK_THROWS_AS(MappedFile("/nonexistent/file"), Error); }
