#include "api/machine_api.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "bindings/isa_choice.h"
#include "bindings/pool_handle.h"
#include "core/arena.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/futex.h"

using namespace ckdist;

namespace {

constexpr int kSpins = 10000;
constexpr int64_t kMostProduct = 1 << 20;      // maximum rows, columns and tokens of a timed product
constexpr int64_t kBetweenBarriers = 1 << 28;  // multiply-adds of a thread between two barriers of a timed product
constexpr int64_t kPromptsFrom = 64;           // products of at least this many rows are prompts'
constexpr uint8_t kNormalByte = 0x3E;  // gives a number of ordinary size in every type, and no subnormal products

void check_threads(int threads) {
  if (threads < 1) fail(Status::config, "%d threads: at least 1 is needed", threads);
}

double seconds_since(int64_t start) { return double(now_ns() - start) * 1e-9; }

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

int ckdist_read_bandwidth(int32_t threads, const int32_t* cpus, int64_t bytes_each, int32_t repeats, double* out) {
  return guard([&] {
    check_threads(threads);
    constexpr int64_t unit = 2048;
    if (bytes_each < unit)
      fail(Status::config, "%lld bytes for each thread: at least %lld are needed", (long long)bytes_each,
           (long long)unit);
    bytes_each = bytes_each / unit * unit;
    Arena memory(threads * bytes_each, "the bandwidth measurement");
    Pool pool(threads, of_threads(cpus, threads), {}, kSpins);
    pool.run(threads, [&](int t) { std::memset(memory.data() + t * bytes_each, t + 1, bytes_each); });
    double best = 0;
    volatile uint64_t sink = 0;
    for (int i = 0; i < repeats; i++) {
      const int64_t start = now_ns();
      pool.run(threads, [&](int t) { sink = kernels().machine.read(memory.data() + t * bytes_each, bytes_each); });
      best = std::max(best, threads * bytes_each / seconds_since(start));
    }
    (void)sink;
    *out = best;
  });
}

int ckdist_arithmetic_rate(const char* isa, int32_t threads, const int32_t* cpus, int32_t format, double seconds,
                           int32_t repeats, double* out) {
  return guard([&] {
    check_threads(threads);
    if (format < 0 || format > int(ActivationFormat::q8))
      fail(Status::config, "activation format %d: there are 0 to %d", format, int(ActivationFormat::q8));
    constexpr int64_t kRounds = 10000;
    const MachineKernel& machine = kernels_by_name(isa).machine;
    Pool pool(threads, of_threads(cpus, threads), {}, kSpins);
    std::atomic<uint64_t> needed{0};
    double best = 0;
    for (int i = 0; i < repeats; i++) {
      std::atomic<int64_t> operations{0};
      const int64_t start = now_ns();
      pool.run(threads, [&](int) {
        uint64_t sink = 0;
        int64_t own = 0;
        while (seconds_since(start) < seconds) own += machine.multiply_add(ActivationFormat(format), kRounds, &sink);
        operations += own;
        needed ^= sink;
      });
      best = std::max(best, double(operations) / seconds_since(start));
    }
    *out = best;
  });
}

int ckdist_product_rate(const char* isa, int32_t type, int32_t threads, const int32_t* cpus, int64_t rows, int64_t cols,
                        int64_t tokens, double seconds, int32_t repeats, double* out) {
  return guard([&] {
    check_threads(threads);
    if (repeats < 1) fail(Status::config, "%d repeats: at least 1 is needed", repeats);
    const TypeTraits& traits = type_traits(type);
    if (traits.block_elements == 0) fail(Status::native, "weight type %d is not known", type);
    if (rows < 1 || cols < 1 || tokens < 1 || rows > kMostProduct || cols > kMostProduct || tokens > kMostProduct ||
        cols % traits.block_elements)
      fail(Status::native, "a product of %lld rows with (%lld, %lld) weights of %s", (long long)tokens, (long long)rows,
           (long long)cols, traits.name);
    const LinearKernel& kernel = kernels_by_name(isa).linear[type];
    const bool prompts = kernel.multiply_prompt && tokens >= kPromptsFrom;
    const int64_t panel = prompts ? kPromptBytes : 0;
    const int64_t stride = ActivationRow::bytes(prompts ? kernel.prompt_activation : kernel.activation, cols);
    Matrix matrix{Type(type), rows, cols, kernel.tile_bytes(cols), nullptr};
    const int64_t tiles = matrix.tile_count() * matrix.tile_bytes, floats = tokens * matrix.tile_count() * kTileRows;
    constexpr int64_t strip = ActivationRow::kStripRows;
    const int64_t rows_bytes = (tokens + strip - 1) / strip * strip * stride;
    const int64_t each = (panel + tiles + rows_bytes + floats * int64_t(sizeof(float)) + 4095) / 4096 * 4096;
    Arena memory(threads * each, "the measurement of products");
    Pool pool(threads, of_threads(cpus, threads), {}, kSpins);
    pool.run(threads, [&](int t) { std::memset(memory.data() + t * each, kNormalByte, each); });
    // Threads meet as often as in steps: after tiles_each tiles, or after some rounds of a small matrix.
    const int64_t tiles_each = std::max(kBetweenBarriers / (kTileRows * cols * tokens), int64_t{1});
    const int64_t rounds = std::max(tiles_each / matrix.tile_count(), int64_t{1});
    std::vector<double> rates;
    for (int i = 0; i < repeats; i++) {
      int64_t products = 0;  // of each thread
      bool enough = false;
      const int64_t start = now_ns();
      pool.run(threads, [&](int t) {
        Matrix own = matrix;
        uint8_t* const room = memory.data() + t * each;
        own.tiles = room + panel;
        uint8_t* const x = room + panel + tiles;
        const auto y = reinterpret_cast<float*>(x + rows_bytes);
        while (!enough) {
          for (int64_t round = 0; round < rounds; round++)
            for (int64_t tile = 0; tile < own.tile_count(); tile += tiles_each) {
              const int64_t end = std::min(tile + tiles_each, own.tile_count());
              if (prompts) kernel.multiply_prompt({own, tile, end, x, stride, true, tokens, y, rows, room});
              else kernel.multiply(own, tile, end, x, stride, tokens, y, rows);
              if (rounds == 1) pool.barrier(t);
            }
          pool.barrier(t, [&] { products += rounds, enough = seconds_since(start) >= seconds; });
        }
      });
      rates.push_back(2.0 * double(products) * threads * rows * cols * tokens / seconds_since(start));
    }
    *out = median(rates);
  });
}

int ckdist_barrier_seconds(int32_t threads, const int32_t* cpus, const int32_t* caches, int32_t spins, double* out) {
  return guard([&] {
    check_threads(threads);
    constexpr int kBarriers = 20000;
    Pool pool(threads, of_threads(cpus, threads), of_threads(caches, threads), spins);
    int64_t start = 0;
    pool.run(threads, [&](int t) {
      for (int i = 0; i < 100; i++) pool.barrier(t);
      if (t == 0) start = now_ns();
      for (int i = 0; i < kBarriers; i++) pool.barrier(t);
    });
    *out = seconds_since(start) / kBarriers;
  });
}

int ckdist_line_round_trip(const int32_t* cpus, int32_t repeats, double* out) {
  return guard([&] {
    constexpr uint32_t kTrips = 2000;
    if (repeats < 1) fail(Status::config, "%d repeats: at least 1 is needed", repeats);
    Pool pool(2, of_threads(cpus, 2), {}, kSpins);
    alignas(64) std::atomic<uint32_t> ball{0};
    std::vector<double> trips(repeats);
    for (double& trip : trips) {
      ball = 0;
      const int64_t start = now_ns();
      pool.run(2, [&](int t) {
        for (uint32_t i = 0; i < kTrips; i++) {
          while (ball.load(std::memory_order_acquire) != 2 * i + uint32_t(t)) cpu_pause();
          ball.store(2 * i + uint32_t(t) + 1, std::memory_order_release);
        }
      });
      trip = seconds_since(start) / kTrips;
    }
    *out = median(trips);
  });
}
