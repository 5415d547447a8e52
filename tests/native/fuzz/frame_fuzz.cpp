// Damaged sessions for the stream transport's parser: frame_fuzz SECONDS [SEED [SESSION]]
//
// An honest rank 1 sends messages, puts, gets and notifications. Its frames are captured, damaged, and fed to rank 0 in
// pieces. Every buffer of rank 0 is a separate heap allocation and is freed as soon as rank 0
// may free it, so AddressSanitizer detects every byte that is stored outside. An undamaged session must arrive whole.
// In a damaged session rank 0 may report that rank 1 broke a rule. Its memory must not exceed the size of the received
// data.
//
// Frames are written here byte by byte, so a change of the wire format fails as well.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/transports/stream_transport.h"
#include "core/error.h"

extern "C" {
size_t __sanitizer_get_current_allocated_bytes();  // gcc has no header for it
const char* __asan_default_options() { return "abort_on_error=1:detect_leaks=0:allocator_may_return_null=1"; }
}

using namespace ckdist;

namespace {

constexpr int64_t kHeader = 48, kArena = 256 << 10;
constexpr int kWindow = 3;

struct Frame {
  uint32_t magic;
  uint8_t kind, pad[3];
  int32_t tag;
  uint32_t mark;
  uint64_t sequence;
  int64_t offset, bytes, total;
};
static_assert(sizeof(Frame) == kHeader);

enum Kind : uint8_t { kMessage = 1, kPut, kGet, kGot, kNotify, kGoodbye, kPlaced, kTaken, kKinds };

struct Sent {
  Frame head;
  std::string data;
};

struct Random {
  std::mt19937_64 engine;
  int64_t below(int64_t n) { return int64_t(engine() % uint64_t(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
};

struct Session {
  uint64_t seed = 0, number = 0;
} session;

[[noreturn]] void wrong(const char* what) {
  std::fprintf(stderr, "frame_fuzz: %s\n", what);
  std::abort();
}

void tell_session() {
  std::fprintf(stderr, "frame_fuzz: in session %llu of seed %llu\n", (unsigned long long)session.number,
               (unsigned long long)session.seed);
}

// One rank whose connections are strings.
class FedTransport : public StreamTransport {
 public:
  FedTransport(int rank, Random& random, std::vector<uint8_t>* arena)
      : StreamTransport(rank, 2, 1), random_(random), arena_(arena) {}

  void idle(int64_t) override {}
  const char* name() const override { return "fed"; }
  using StreamTransport::progress;

  std::string in, out;  // read bytes of `in` are removed
  bool whole = true;    // reads return all available bytes
  bool stuck = false;   // writes accept nothing

 private:
  int64_t write(int, const void* data, int64_t bytes) override {
    if (stuck) return 0;
    out.append(static_cast<const char*>(data), size_t(bytes));
    return bytes;
  }
  int64_t read(int, void* data, int64_t bytes) override {
    if (read_ > (1 << 20)) in.erase(0, size_t(std::exchange(read_, 0)));
    int64_t n = std::min(bytes, int64_t(in.size()) - read_);
    if (!whole && n > 1) n = random_.one_in(3) ? 1 : 1 + random_.below(n);
    if (n) std::memcpy(data, in.data() + read_, size_t(n));
    read_ += n;
    return n;
  }
  int64_t placed(const void* data, int64_t bytes) const override {
    const int64_t offset = static_cast<const uint8_t*>(data) - arena_->data();
    return rank == 1 && offset >= 0 && offset + bytes <= int64_t(arena_->size()) ? offset : -1;
  }
  const uint8_t* in_place(int, int64_t offset, int64_t bytes) const override {
    return offset <= int64_t(arena_->size()) - bytes ? arena_->data() + offset : nullptr;
  }
  Random& random_;
  std::vector<uint8_t>* arena_;
  int64_t read_ = 0;
};

using Bytes = std::unique_ptr<uint8_t[]>;

uint8_t byte_of(int message, int64_t i) { return uint8_t(message * 31 + i * 7 + (i >> 9)); }

struct Message {
  int number, tag;
  int64_t bytes;
  Bytes data;  // the sender's
  Bytes into;  // the receiver's, while it waits
  bool asked = false, arrived = false;
  Transport::Request request = 0;
};

class Run {
 public:
  explicit Run(uint64_t seed)
      : random_{std::mt19937_64(seed)},
        arena_(random_.one_in(3) ? kArena : 0),
        receiver_(0, random_, &arena_),
        sender_(1, random_, &arena_) {}

  // Returns false if rank 0 refused a frame.
  bool run() {
    converse();
    std::vector<Sent> frames = caught();
    const bool damaged = !random_.one_in(5);
    for (int64_t n = damaged ? 1 + random_.below(3) : 0; n > 0 && !frames.empty(); n--) damage(frames);
    honest_ = !damaged && !goodbye_;
    const size_t before = __sanitizer_get_current_allocated_bytes();
    bool refused = false;
    try {
      feed(frames);
    } catch (const Error& error) {
      if (honest_ || error.status() != Status::comm || std::strncmp(error.what(), "rank 1", 6)) wrong(error.what());
      refused = true;
      after_error();
    }
    for (const Message& message : messages_)
      if (honest_ && !message.arrived) wrong("a message did not arrive");
    receiver_.in.clear(), receiver_.in.shrink_to_fit();
    const int64_t held = int64_t(__sanitizer_get_current_allocated_bytes()) - int64_t(before);
    // Rank 0's own buffers, received data (vectors double their size), and a record for each message or request.
    if (held > (8 << 20) + 4 * data_fed_ + 1024 * records_fed_) wrong("more memory is held than data came");
    return !refused;
  }

 private:
  int64_t some_bytes() {
    constexpr int64_t kSizes[] = {0, 1, 63, 64, 65, 4096, 40000, 70000, 200000, (512 << 10) - 1, 512 << 10, 600001};
    return kSizes[random_.below(random_.one_in(4) ? std::size(kSizes) : 8)];
  }

  // Rank 1 makes allowed calls, and answers rank 0's requests.
  void converse() {
    window_bytes_ = 1 + random_.below(200);
    window_.reset(new uint8_t[window_bytes_]()), there_.reset(new uint8_t[window_bytes_]());
    receiver_.expose(kWindow, window_.get(), window_bytes_);
    sender_.expose(kWindow, there_.get(), window_bytes_);
    for (int64_t n = 1 + random_.below(6); n > 0; n--) {
      const int64_t at = random_.below(window_bytes_), some = random_.below(window_bytes_ - at + 1);
      switch (random_.below(6)) {
        case 0: sender_.iput(0, kWindow, at, there_.get() + at, some); break;
        case 1: sender_.inotify(0, kWindow, int(random_.below(4))); break;
        case 2:
          kept_.emplace_back(new uint8_t[some + 1]);
          sender_.iget(0, kWindow, at, kept_.back().get(), some);
          break;
        case 3:
          kept_.emplace_back(new uint8_t[some + 1]);
          receiver_.iget(1, kWindow, at, kept_.back().get(), some);
          sender_.in += std::exchange(receiver_.out, "");
          sender_.progress();
          break;
        default: send();
      }
    }
    if ((goodbye_ = random_.one_in(20))) sender_.abandon("the end");
  }

  void send() {
    Message message{int(messages_.size()), int(random_.below(3)), some_bytes(), nullptr, nullptr};
    const bool placed = message.bytes >= (32 << 10) && message.bytes <= int64_t(arena_.size()) && random_.one_in(2);
    if (placed && std::exchange(arena_used_, true)) return;  // the arena has room for one
    message.data.reset(new uint8_t[message.bytes + 1]);
    uint8_t* const from = placed ? arena_.data() : message.data.get();
    for (int64_t i = 0; i < message.bytes; i++) from[i] = byte_of(message.number, i);
    messages_.push_back(std::move(message));
    Message& last = messages_.back();
    if (random_.one_in(2)) ask(last);
    sender_.isend(0, last.tag, from, last.bytes);
  }

  // Posts receives of one tag in the order of their messages.
  void ask(const Message& message) {
    if (message.asked) return;
    for (Message& earlier : messages_) {
      if (earlier.tag != message.tag || earlier.asked) continue;
      earlier.into.reset(new uint8_t[earlier.bytes]);
      earlier.asked = true;
      earlier.request = receiver_.irecv(1, earlier.tag, earlier.into.get(), earlier.bytes);
      if (&earlier == &message) return;
    }
  }

  std::vector<Sent> caught() {
    std::vector<Sent> frames;
    for (size_t at = 0; at < sender_.out.size();) {
      Sent sent;
      std::memcpy(&sent.head, sender_.out.data() + at, size_t(kHeader));
      at += size_t(kHeader);
      const size_t bytes = sent.head.kind == kGet ? 0 : size_t(sent.head.bytes);
      sent.data = sender_.out.substr(at, bytes);
      at += bytes;
      frames.push_back(std::move(sent));
    }
    return frames;
  }

  template <class Number>
  Number edge(Number old) {
    constexpr int64_t kEdges[] = {0,
                                  1,
                                  2,
                                  -1,
                                  63,
                                  64,
                                  65,
                                  4096,
                                  5000,
                                  65535,
                                  65536,
                                  1 << 20,
                                  64 << 20,
                                  (64 << 20) + 1,
                                  INT32_MAX,
                                  INT32_MIN,
                                  1LL << 31,
                                  1LL << 40,
                                  (1LL << 40) + 1,
                                  INT64_MAX,
                                  INT64_MIN};
    if (random_.one_in(3)) return Number(uint64_t(old) + uint64_t(random_.below(5)) - 2);
    return Number(kEdges[random_.below(std::size(kEdges))]);
  }

  void change_field(Sent& sent) {
    Frame& h = sent.head;
    switch (random_.below(8)) {
      case 0: h.kind = uint8_t(random_.below(kKinds + 2)); break;
      case 1: h.tag = edge(h.tag); break;
      case 2: h.mark = edge(h.mark); break;
      case 3: h.sequence = edge(h.sequence); break;
      case 4: h.offset = edge(h.offset); break;
      case 5: h.total = edge(h.total); break;
      case 6: h.bytes = edge(h.bytes); break;
      default: (random_.one_in(2) ? h.pad[0] : reinterpret_cast<uint8_t&>(h.magic)) ^= 1;
    }
    if (random_.one_in(2)) h.total = std::max(h.total, h.bytes);
    // Keeps the stream synchronized: the announced number of bytes follows.
    if (random_.one_in(2) && h.bytes >= 0) sent.data.resize(size_t(std::min<int64_t>(h.bytes, 1 << 20)), 'A');
  }

  void damage(std::vector<Sent>& frames) {
    const size_t which = size_t(random_.below(int64_t(frames.size())));
    Sent& sent = frames[which];
    const Sent copy = sent;
    switch (random_.below(22)) {
      case 0: frames.erase(frames.begin() + long(which)); break;
      case 1: std::swap(sent, frames[size_t(random_.below(int64_t(frames.size())))]); break;
      case 2:
      case 3:
      case 4:
      case 5: frames.insert(frames.begin() + long(which), copy); break;
      case 6: sent.data.resize(size_t(random_.below(int64_t(sent.data.size()) + 1))); break;
      case 7:
        if (random_.one_in(40)) flood(frames);
        break;
      default: change_field(sent);
    }
  }

  // The next number; the smallest one after the largest, as a damaged field may hold that.
  template <class Integer>
  static Integer next(Integer value) {
    return Integer(std::make_unsigned_t<Integer>(value) + 1);
  }

  // The same frame very often, one field counting on; best one without data.
  void flood(std::vector<Sent>& frames) {
    size_t which = 0;
    while (which + 1 < frames.size() && (!frames[which].data.empty() || random_.one_in(4))) which++;
    Sent copy = frames[which];
    if (copy.data.size() > 64) return;
    const int64_t field = random_.below(3);
    std::vector<Sent> many;
    for (int64_t n = 0; n < 300'000; n++) {
      if (field == 0) copy.head.offset = next(copy.head.offset);
      if (field == 1) copy.head.sequence = next(copy.head.sequence);
      if (field == 2) copy.head.tag = next(copy.head.tag);
      many.push_back(copy);
    }
    frames.insert(frames.begin() + long(which), many.begin(), many.end());
  }

  void feed(const std::vector<Sent>& frames) {
    receiver_.whole = random_.one_in(2);
    receiver_.stuck = random_.one_in(3);
    const int64_t cut = !honest_ && random_.one_in(8) ? 1 + random_.below(200) : 0;  // of the last frame
    for (size_t next = 0; next < frames.size();) {
      const int64_t burst = frames.size() > 1000 ? 5000 : 1 + random_.below(3);
      for (int64_t n = burst; n > 0 && next < frames.size(); n--, next++) {
        receiver_.in += std::exchange(rest_, "");
        give(frames[next], next + 1 == frames.size() ? cut : 0);
      }
      if (random_.one_in(3) && !messages_.empty()) ask(messages_[size_t(random_.below(int64_t(messages_.size())))]);
    }
    receiver_.in += std::exchange(rest_, "");
    for (int n = 0; n < 40; n++) turn();
    for (const Message& message : messages_) ask(message);
    for (int n = 0; n < 40; n++) turn();
  }

  void give(const Sent& sent, int64_t cut) {
    std::string bytes(reinterpret_cast<const char*>(&sent.head), size_t(kHeader));
    bytes += sent.data;
    bytes.resize(bytes.size() - std::min(bytes.size(), size_t(cut)));
    const uint8_t kind = sent.head.kind;
    records_fed_ += kind == kMessage || kind == kPlaced || kind == kGet;
    data_fed_ += int64_t(sent.data.size());
    if (bytes.size() > 1000 && random_.one_in(2)) {  // the rank polls in the middle of it
      const size_t half = size_t(random_.below(int64_t(bytes.size())));
      receiver_.in += bytes.substr(0, half);
      rest_ = bytes.substr(half);
      turn();
      return;
    }
    receiver_.in += bytes;
    if (!random_.one_in(4)) turn();
  }

  void turn() {
    receiver_.progress();
    for (Message& message : messages_)
      if (message.into && !message.arrived && receiver_.test(message.request)) arrived(message);
  }

  // Its receiver has the memory back, reads it, and frees it.
  void arrived(Message& message) {
    for (int64_t i = 0; i < message.bytes && honest_; i++)
      if (message.into[i] != byte_of(message.number, i)) wrong("a message arrived with other bytes");
    message.arrived = true;
    message.into.reset();
  }

  // Callers have an error and their memory back; the rank may still poll.
  void after_error() {
    for (Message& message : messages_) message.into.reset();
    for (int n = 0; n < 10; n++) try {
        receiver_.progress();
      } catch (const Error&) {}
  }

  Random random_;
  std::vector<uint8_t> arena_;
  FedTransport receiver_, sender_;
  std::string rest_;  // of a frame that is fed in two pieces
  Bytes window_, there_;
  std::vector<Bytes> kept_;
  int64_t window_bytes_ = 0, data_fed_ = 0, records_fed_ = 0;
  bool honest_ = true, goodbye_ = false, arena_used_ = false;
  std::vector<Message> messages_;
};

}  // namespace

int main(int count, char** words) {
  const double seconds = count > 1 ? std::atof(words[1]) : 5;
  session.seed = count > 2 ? std::strtoull(words[2], nullptr, 10) : std::random_device()();
  const uint64_t only = count > 3 ? std::strtoull(words[3], nullptr, 10) : 0;
  std::signal(SIGABRT, [](int) { tell_session(); });
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t refused = 0;
  for (session.number = only ? only : 1; only ? session.number == only : std::chrono::steady_clock::now() < end;
       session.number++)
    refused += !Run(session.seed * 0x9E3779B97F4A7C15 + session.number).run();
  std::printf("%llu sessions of seed %llu, %llu of them refused\n", (unsigned long long)(session.number - 1),
              (unsigned long long)session.seed, (unsigned long long)refused);
}
