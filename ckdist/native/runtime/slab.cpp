#include "runtime/slab.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ckdist {

namespace {

constexpr char kMagic[] = "ckslab01";  // its last two characters are the version
constexpr int64_t kAlignment = 4096;
static_assert(sizeof(ckdist_slab_header) == 256, "the format of the file");

// Each step is a bijection of a lane, so a change of one word always changes the result.
class Checksum {
 public:
  void add(const void* from, int64_t bytes) {
    const auto* p = static_cast<const uint8_t*>(from);
    for (; bytes >= 32; p += 32, bytes -= 32)
      for (int lane = 0; lane < 4; lane++) mix(lane, p + 8 * lane, 8);
    for (int lane = 0; bytes > 0; lane++, p += 8, bytes -= 8) mix(lane, p, bytes < 8 ? bytes : 8);
  }
  uint64_t get() const {
    uint64_t sum = 0;
    for (const uint64_t lane : lanes_) sum = rotated((sum ^ lane) * kOdd);
    return sum;
  }

 private:
  static constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;

  static uint64_t rotated(uint64_t x) { return x << 31 | x >> 33; }
  void mix(int lane, const uint8_t* from, int64_t bytes) {
    uint64_t word = 0;
    std::memcpy(&word, from, size_t(bytes));
    lanes_[lane] = rotated((lanes_[lane] ^ word) * kOdd);
  }

  uint64_t lanes_[4] = {1, 2, 3, 4};
};

uint64_t checksum(const ckdist_slab_header& header, const uint8_t* data, int64_t bytes) {
  Checksum sum;
  sum.add(header.magic, sizeof header.magic);
  sum.add(&header.entry, sizeof header.entry);
  sum.add(data, bytes);
  return sum.get();
}

// Calls pread or pwrite until all bytes have moved. Returns 0 or an errno; `ended` if the file takes no more.
template <class Call, class Byte>
int move_all(Call call, int file, Byte* p, int64_t bytes, int64_t at, int ended) {
  while (bytes > 0) {
    const ssize_t n = call(file, p, size_t(bytes), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : ended;
    p += n, bytes -= n, at += n;
  }
  return 0;
}
int read_all(int file, void* to, int64_t bytes, int64_t at) {
  return move_all(pread, file, static_cast<uint8_t*>(to), bytes, at, EBADMSG);
}
int write_all(int file, const void* from, int64_t bytes, int64_t at) {
  return move_all(pwrite, file, static_cast<const uint8_t*>(from), bytes, at, ENOSPC);
}

}  // namespace

Slab::Slab(int headers_file, int data_file, int64_t bytes, int64_t slots)
    : headers_file_(headers_file), data_file_(data_file), slots_(slots), data_(size_t(bytes)) {}

int64_t Slab::stride(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool Slab::is_sound(const ckdist_slab_header& header, const uint8_t* data, int64_t bytes) {
  return std::memcmp(header.magic, kMagic, sizeof header.magic) == 0 &&
         header.checksum == checksum(header, data, bytes);
}

int Slab::write(int64_t slot, const ckdist_slab_entry& entry) {
  const int64_t bytes = int64_t(data_.size()), at = slot * int64_t{sizeof(ckdist_slab_header)};
  ckdist_slab_header header{};
  if (const int error = write_all(headers_file_, &header, sizeof header, at)) return error;
  if (const int error = write_all(data_file_, data(), bytes, slot * stride(bytes))) return error;
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  header.entry = entry;
  header.checksum = checksum(header, data(), bytes);
  return write_all(headers_file_, &header, sizeof header, at);
}

int Slab::read(int64_t slot, const ckdist_slab_entry& entry) {
  const int64_t bytes = int64_t(data_.size());
  ckdist_slab_header header;
  if (const int error = read_all(headers_file_, &header, sizeof header, slot * int64_t{sizeof header})) return error;
  ckdist_slab_entry wanted = entry;
  std::memcpy(wanted.generation, header.entry.generation, sizeof wanted.generation);
  if (std::memcmp(&wanted, &header.entry, sizeof wanted) != 0) return EBADMSG;
  if (const int error = read_all(data_file_, data(), bytes, slot * stride(bytes))) return error;
  return is_sound(header, data(), bytes) ? 0 : EBADMSG;
}

void Slab::read_ahead(int64_t slot) const {
  const int64_t bytes = int64_t(data_.size());
  posix_fadvise(data_file_, slot * stride(bytes), bytes, POSIX_FADV_WILLNEED);
}

}  // namespace ckdist
