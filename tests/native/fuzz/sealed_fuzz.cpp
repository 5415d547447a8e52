// Damaged streams of sealed records: sealed_fuzz SECONDS [SEED]
//
// A stream is changed, cut, repeated, reordered or inserted into between two sockets. The reader must get a beginning
// of what was written and then an error or the end, whatever sizes it reads.
//
// Other sessions have two ends that write to each other while their connection breaks at any moment, and is made again
// with right or wrong numbers of received bytes. Whatever is read is a beginning of what was written; with right
// numbers, all of it arrives, sealed or not.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "comm/transports/sealed_socket.h"
#include "core/error.h"

using namespace ckdist;

namespace {

using Bytes = std::vector<uint8_t>;
std::mt19937_64 random_bits;

uint64_t below(uint64_t n) { return random_bits() % n; }

Bytes random_bytes(size_t count) {
  Bytes bytes(count);
  for (uint8_t& b : bytes) b = uint8_t(random_bits());
  return bytes;
}

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

struct Pair {
  int ends[2];
  Pair() {
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) die("no socketpair");
  }
};

// Records of `plain`, and where each of them begins.
Bytes sealed(const Bytes& plain, const Bytes& keys, std::vector<size_t>* begins) {
  Pair pair;
  SealedSocket writer(pair.ends[0], keys.data());
  Bytes stream, part(1 << 18);
  const auto collect = [&] {
    for (ssize_t n; (n = recv(pair.ends[1], part.data(), part.size(), MSG_DONTWAIT)) > 0;)
      stream.insert(stream.end(), part.begin(), part.begin() + n);
  };
  for (size_t done = 0; done < plain.size();) {
    const size_t piece = std::min<size_t>(plain.size() - done, 1 + below(below(4) ? 300 : 200'000));
    done += size_t(writer.write(plain.data() + done, int64_t(piece)));
    if (below(2)) writer.flush();
    collect();
  }
  while (!writer.flush()) collect();
  collect();
  close(pair.ends[1]);
  for (size_t at = 0; at < stream.size();) {
    begins->push_back(at);
    const int64_t inside = Sealer::data_bytes(stream.data() + at);
    if (inside < 0) die("the writer made no record");
    at += size_t(inside + Sealer::kExtra);
  }
  return stream;
}

// Returns false if it is still the same.
bool damage(Bytes& stream, const std::vector<size_t>& begins) {
  const Bytes before = stream;
  const auto record = [&] {
    const size_t i = below(begins.size());
    return std::make_pair(begins[i], i + 1 < begins.size() ? begins[i + 1] : stream.size());
  };
  const auto at = [&](size_t i) { return stream.begin() + ptrdiff_t(i); };
  switch (below(6)) {
    case 0: stream[below(stream.size())] ^= uint8_t(1 << below(8)); break;
    case 1: stream.resize(below(stream.size())); break;
    case 2: {  // repeated
      const auto [begin, end] = record();
      const Bytes copy(at(begin), at(end));
      stream.insert(at(end), copy.begin(), copy.end());
      break;
    }
    case 3: {  // left out
      const auto [begin, end] = record();
      stream.erase(at(begin), at(end));
      break;
    }
    case 4: {  // reordered
      const auto [begin, end] = record();
      const Bytes copy(at(begin), at(end));
      stream.erase(at(begin), at(end));
      stream.insert(stream.begin(), copy.begin(), copy.end());
      break;
    }
    default: {  // injected
      const Bytes more = random_bytes(1 + below(100));
      stream.insert(at(below(stream.size() + 1)), more.begin(), more.end());
    }
  }
  return stream != before;
}

void session(int* broken) {
  const Bytes keys = random_bytes(2 * Sealer::kKeyBytes);
  Bytes other(keys.begin() + Sealer::kKeyBytes, keys.end());  // the reader's: to send, and to receive
  other.insert(other.end(), keys.begin(), keys.begin() + Sealer::kKeyBytes);
  const Bytes plain = random_bytes(1 + below(below(3) ? 5000 : 400'000));
  std::vector<size_t> begins;
  const Bytes whole = sealed(plain, keys, &begins);
  Bytes stream = whole;
  // What follows the last record may look like the beginning of one: then the stream ends in it, as of a killed writer.
  const bool damaged = below(5) && damage(stream, begins) &&
                       !(stream.size() > whole.size() && std::equal(whole.begin(), whole.end(), stream.begin()));
  Pair pair;
  SealedSocket reader(pair.ends[1], other.data());
  Bytes got, part(200'000);
  size_t sent = 0;
  bool ended = false, refused = false;
  while (!ended && !refused) {
    if (sent < stream.size()) {
      const size_t n = std::min<size_t>(stream.size() - sent, 1 + below(below(2) ? 100 : 150'000));
      const ssize_t done = send(pair.ends[0], stream.data() + sent, n, MSG_DONTWAIT);
      if (done > 0) sent += size_t(done);
      if (sent == stream.size()) shutdown(pair.ends[0], SHUT_WR);
    } else if (stream.empty()) {
      shutdown(pair.ends[0], SHUT_WR);
    }
    for (;;) {
      const int64_t room = 1 + int64_t(below(below(2) ? 100 : part.size()));
      const ssize_t n = reader.read(part.data(), room);
      if (n > room) die("more was read than there is room for");
      if (n > 0) got.insert(got.end(), part.begin(), part.begin() + n);
      ended = n == 0;
      refused = n < 0 && errno == EBADMSG;
      if (n <= 0) break;
    }
  }
  close(pair.ends[0]);
  if (got.size() > plain.size() || !std::equal(got.begin(), got.end(), plain.begin())) die("other bytes were read");
  if (stream == whole && refused) die("a good stream was refused");
  if (!damaged && got.size() != plain.size()) die("a good beginning was refused");
  if (damaged && !refused && got.size() == plain.size()) die("a damaged stream passed");
  *broken += refused;
}

// A TCP connection over loopback: its ends.
Pair connection() {
  Pair pair;
  close(pair.ends[0]), close(pair.ends[1]);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, any, size) || listen(listener, 1) || getsockname(listener, any, &size)) die("no listener");
  pair.ends[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(pair.ends[0], any, size)) die("no connection");
  pair.ends[1] = accept(listener, nullptr, nullptr);
  close(listener);
  const int room = 4096 << below(6);
  for (const int end : pair.ends) setsockopt(end, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  return pair;
}

struct End {
  SealedSocket socket;
  Bytes plain, got;
  size_t written = 0;

  void read() {
    Bytes part(1 + below(200'000));
    const ssize_t n = socket.read(part.data(), int64_t(part.size()));
    if (n < 0 && errno == EBADMSG) fail(Status::comm, "bytes that are not sealed");
    if (n > 0) got.insert(got.end(), part.begin(), part.begin() + n);
  }
};

// Both ends take a new connection, as ckdist/comm/transports/reconnection.py does. wrong: added to a number.
void connect_again(End& first, End& second, int64_t wrong) {
  first.socket.pause();
  const auto there = second.socket.pause(), here = first.socket.pause();
  const Pair pair = connection();
  const bool fails = below(8) == 0;  // the first end never learns that the second one reads
  second.socket.resume(pair.ends[1], here.received, there.attempt, true);
  uint8_t mark;
  if (recv(pair.ends[0], &mark, 1, 0) != 1) die("no mark");
  if (fails) close(pair.ends[0]), connect_again(first, second, wrong);
  else first.socket.resume(pair.ends[0], there.received + uint64_t(wrong), here.attempt, false);
}

void session_of_breaks(int* broken) {
  const Bytes keys = random_bytes(2 * Sealer::kKeyBytes);
  Bytes other(keys.begin() + Sealer::kKeyBytes, keys.end());
  other.insert(other.end(), keys.begin(), keys.begin() + Sealer::kKeyBytes);
  const auto reports = std::make_shared<BrokenSockets>();
  const Pair pair = connection();
  const bool is_sealed = below(3);
  End ends[] = {{SealedSocket(pair.ends[0], is_sealed ? keys.data() : nullptr), random_bytes(1 + below(600'000)), {}},
                {SealedSocket(pair.ends[1], is_sealed ? other.data() : nullptr), random_bytes(1 + below(600'000)), {}}};
  for (End& end : ends) end.socket.outlive(reports, 0);
  const bool lies = is_sealed && below(4) == 0;
  int breaks = 20;
  const auto exchange = [&] {
    for (End& end : ends) {
      const size_t piece = std::min<size_t>(end.plain.size() - end.written, 1 + below(below(2) ? 300 : 400'000));
      end.written += size_t(end.socket.write(end.plain.data() + end.written, int64_t(piece)));
      end.socket.flush();
      if (below(2)) end.read();
    }
    if (breaks == 0 || below(20)) return;
    if (below(3)) shutdown(ends[below(2)].socket.fd(), below(2) ? SHUT_RDWR : SHUT_WR);
    for (End& end : ends)
      if (below(2)) end.read();
    const size_t first = below(2);
    connect_again(ends[first], ends[1 - first], lies && below(3) == 0 ? int64_t(below(200'000)) - 100'000 : 0);
    breaks--;
  };
  try {
    // After a wrong number, an end may wait for the rest of a record that nobody sends.
    for (int rounds = 0; ends[0].got.size() < ends[1].plain.size() || ends[1].got.size() < ends[0].plain.size();)
      if (exchange(); lies && rounds++ > 3000) break;
  } catch (const Error& error) {
    if (!lies) die(error.what());
    ++*broken;
  }
  for (int i = 0; i < 2; i++) {
    const Bytes &got = ends[i].got, &plain = ends[1 - i].plain;
    if (got.size() > plain.size() || !std::equal(got.begin(), got.end(), plain.begin())) die("other bytes came");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  random_bits.seed(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int sessions = 0, broken = 0;
  std::fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
  while (std::chrono::steady_clock::now() < end) below(4) ? session(&broken) : session_of_breaks(&broken), sessions++;
  std::printf("%d sessions of seed %llu, %d of them refused\n", sessions, (unsigned long long)seed, broken);
}
