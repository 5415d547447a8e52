// Division of a product's weights among threads: complete, and even on many threads.
#include <algorithm>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "runtime/shares.h"

using namespace ckdist;

namespace {

struct Product {
  int64_t rows, cols;
  int64_t width = 1;  // 2: tiles of gate and up lie side by side; 4: weights of that many times the bytes
  int64_t tiles() const { return (rows + 15) / 16; }
  int64_t tile_bytes() const { return (cols + 255) / 256 * 16 * 144 * width; }  // Q4_K: 144 bytes for 256 columns
  int64_t parts(int threads) const { return column_parts(tiles(), cols, threads); }
};
// Products of one step are laid end to end.
struct Step {
  std::string name;
  std::vector<Product> products;
};

int64_t part(int64_t n, int ranks, int64_t unit) { return (n / unit + ranks - 1) / ranks * unit; }

// The matrices of a rank with the largest shard.
std::vector<Step> dense(const std::string& name, int ranks, int64_t hidden, int64_t heads, int64_t ffn, int64_t vocab) {
  const int64_t q = part(heads * 128, ranks, 128), kv = part(8 * 128, ranks, 128), own_ffn = part(ffn, ranks, 256);
  return {{name + " qkv", {{q, hidden}, {kv, hidden}, {kv, hidden}}},
          {name + " o", {{hidden, q}}},
          {name + " gate and up", {{own_ffn, hidden, 2}}},
          {name + " down", {{hidden, own_ffn}}},
          {name + " logits", {{part(vocab, ranks, 16), hidden}}}};
}

std::vector<Step> kimi_k2(int ranks) {
  const int64_t hidden = 7168, dense = part(18432, ranks, 256), shared = part(2048, ranks, 256);
  return {{"K2 q_a and kv_a", {{1536, hidden}, {576, hidden}}},
          {"K2 q_b", {{part(64 * 192, ranks, 192), 1536}}},
          {"K2 o", {{hidden, part(64 * 128, ranks, 128)}}},
          {"K2 gate and up", {{dense, hidden, 2}}},
          {"K2 down", {{hidden, dense}}},
          {"K2 shared gate and up", {{shared, hidden, 2}}},
          {"K2 shared down", {{hidden, shared}}},
          {"K2 router", {{384, hidden, 4}}},
          {"K2 logits", {{part(163840, ranks, 16), hidden}}}};
}

// Bytes of the busiest of `threads` equally fast threads, each of which takes the next piece when it is free.
int64_t busiest(const Step& step, int threads) {
  int64_t bytes = 0, cell = 0;
  for (const Product& p : step.products)
    bytes += p.tiles() * p.tile_bytes(), cell = std::max(cell, p.tile_bytes() / p.parts(threads));
  const Shares shares(bytes, cell, threads, true);
  const auto bytes_of = [&](int64_t piece) {
    int64_t sum = 0, offset = 0;
    for (const Product& p : step.products) {
      // Bytes of the matrix before a piece that begins at this byte of the step.
      const auto at = [&](int64_t byte) {
        const int64_t parts = p.parts(threads), tile = p.tile_bytes(), units = (p.cols + 255) / 256;
        const int64_t cells = boundary(byte - offset, tile / parts, p.tiles() * parts, shares.first(), threads);
        return cells / parts * tile + part_columns(units * 256, cells % parts, parts).begin / 256 * (tile / units);
      };
      sum += at(shares.begin(piece + 1)) - at(shares.begin(piece));
      offset += p.tiles() * p.tile_bytes();
    }
    return sum;
  };
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> busy_until;
  for (int thread = 0; thread < threads; thread++) busy_until.push(bytes_of(thread));
  int64_t most = 0, total = 0;
  for (int64_t piece = threads; piece < shares.pieces(); piece++) {
    const int64_t free = busy_until.top();
    busy_until.pop();
    busy_until.push(free + bytes_of(piece));
  }
  for (; !busy_until.empty(); busy_until.pop()) most = busy_until.top(), total += most;
  CHECK(total == bytes);
  return most;
}

}  // namespace

TEST_CASE("shares cover every byte once, whatever their number") {
  for (const int64_t bytes : {0, 1, 100, 65536, 10'000'019})
    for (const int threads : {1, 2, 3, 16, 384})
      for (const bool few : {true, false}) {
        const Shares shares(bytes, 48, threads, few);
        CHECK(shares.begin(0) == 0);
        for (int64_t piece = 0; piece < shares.pieces(); piece++) CHECK(shares.begin(piece) <= shares.begin(piece + 1));
        CHECK(shares.begin(shares.pieces()) == bytes);
      }
}

TEST_CASE("the busiest of many threads has at most 1.15 of the mean, or one smallest cell more than the others") {
  constexpr int64_t enough = 8;  // cells of 256 columns of each thread, from which on pieces are small
  for (int ranks = 1; ranks <= 12; ranks++) {
    std::vector<Step> steps = dense("8B", ranks, 4096, 32, 14336, 128256);
    for (Step& step : dense("70B", ranks, 8192, 64, 28672, 128256)) steps.push_back(step);
    for (Step& step : kimi_k2(ranks)) steps.push_back(step);
    for (const Step& step : steps)
      for (const int machine : {48, 96, 192, 384})
        for (const int threads :
             {machine / ranks, machine}) {  // the machine's threads divided among ranks, or all per rank
          if (threads <= kSixteen) continue;
          CAPTURE(step.name);
          CAPTURE(ranks);
          CAPTURE(threads);
          int64_t cells = 0, cell_bytes = 0, bytes = 0;
          for (const Product& p : step.products) {
            const int64_t units = (p.cols + 255) / 256;
            cells += p.tiles() * units, cell_bytes = p.tile_bytes() / units, bytes += p.tiles() * p.tile_bytes();
          }
          const double mean = double(bytes) / threads, most = double(busiest(step, threads));
          if (cells >= enough * threads || threads < machine) CHECK(most / mean <= 1.15);
          else CHECK(most <= double((cells + threads - 1) / threads * cell_bytes));
        }
  }
}

TEST_CASE("parts of columns are none up to sixteen threads, and cover all columns else") {
  CHECK(column_parts(256, 4096, 16) == 1);
  CHECK(column_parts(256, 4096, 17) == 1);   // 15 tiles for each thread
  CHECK(column_parts(64, 4096, 48) == 8);    // 6 would be enough, and 8 are equal
  CHECK(column_parts(24, 7168, 384) == 28);  // all that there are
  CHECK(column_parts(24, 0, 384) == 1);
  CHECK(column_parts(0, 4096, 384) == 1);
  for (const int64_t cols : {0, 32, 256, 400, 1280, 4096, 7168})
    for (const int parts : {1, 2, 3, 5}) {
      int64_t at = 0;
      for (int part = 0; part < parts; part++) {
        const Range own = part_columns(cols, part, parts);
        CHECK(own.begin == at);
        CHECK(own.begin % 256 == 0);
        at = own.end;
      }
      CHECK(at == cols);
    }
}

TEST_CASE("threads sum a row in whole lines, and a thread reads few lines of the summands") {
  for (const int threads : {1, 5, 48, 96, 192, 384})
    for (const int64_t width : {40, 4096, 7168, 8192}) {
      int64_t at = 0, most = 0;
      for (int t = 0; t < threads; t++) {
        const Range own = own_columns(width, t, threads);
        CHECK(own.begin == std::min(at, width));
        CHECK(own.begin % 16 == 0);
        at = std::max(at, own.end), most = std::max(most, own.end - own.begin);
      }
      CHECK(at == width);
      CHECK(most <= (width / 16 / threads + 1) * 16);
    }
  // 7 other ranks' summands and the row itself, and then the sum: 528 lines in place of 3,584.
  const Range own = own_columns(7168, 2, 48);
  CHECK((own.end - own.begin + 15) / 16 * 8 + 7168 / 16 == 528);
}

TEST_CASE("own tiles and items of a product of many rows cover every tile and row once") {
  for (const int64_t tiles : {1, 3, 64, 129, 1024})
    for (const int threads : {1, 2, 3, 16, 384})
      for (const int64_t rows : {128, 200, 512, 600, 1000, 1002}) {
        CAPTURE(tiles);
        CAPTURE(threads);
        CAPTURE(rows);
        constexpr int64_t kBytes = 3072;
        const int64_t tiles_each = rows % 3 == 0 ? 16 : 8;
        const Blocks blocks(tiles * kBytes, kBytes, threads, rows, 16 * tiles_each, tiles_each);
        std::vector<int> seen(size_t(tiles * rows));
        const auto take = [&](int64_t from, int64_t to, int64_t first, int64_t end) {
          const auto at = [&](int64_t byte) { return boundary(byte, kBytes, tiles, INT64_MAX, threads); };
          for (int64_t tile = at(from); tile < at(to); tile++)
            for (int64_t row = first; row < end; row++) seen[size_t(tile * rows + row)]++;
        };
        for (int thread = 0; thread < threads; thread++) take(blocks.begin(thread), blocks.end(thread), 0, rows);
        for (int64_t i = 0; i < blocks.items(); i++)
          take(blocks.item_begin(i), blocks.item_end(i), blocks.first_row(i), blocks.end_row(i));
        CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
      }
}
